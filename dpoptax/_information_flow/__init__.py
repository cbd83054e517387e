"""Finds results of a step that depend on private data or secrets without noise.

`information_flow.information_flow` is the entry point. It traces the step, and a `LabelFollower`
passes a `Label` along every equation. A label holds `Content` (the kinds of data that a value may
depend on), `ExampleAxes` (where the examples are in private data) and `EntryFacts` (facts about
public indices and keys). Marks that `clipped_grad` and noise stages leave in the program
(`dpoptax._support.marks`) change labels. `Derivations` shows that no key draws noise twice.
"""
