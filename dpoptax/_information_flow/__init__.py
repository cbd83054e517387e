"""Finds which results of a step depend on private data or secrets other than through noise.

`information_flow.information_flow` is the entry point. It traces the step, and a `LabelFollower`
passes a `Label` along every equation:

- `Content`: the kinds of data that a value may depend on, such as private examples or a secret key.
- `ExampleAxes`: where the examples are in an array with private data. Clipping bounds a row only if
  the row belongs to one example.
- `EntryFacts` and `Derivations`: facts about public values, which show that no example is gathered
  twice and that no key draws noise twice.

Marks that `clipped_grad` and noise stages leave in the program (`dpoptax._marks`) change labels.
"""
