"""Private training inside other libraries' trainers: one module for each library.

Each module needs its library and imports it. Nothing else in dpoptax imports these modules.
"""
