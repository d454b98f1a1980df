"""The pool behind inference engines. Engines are imported by the module of each, and only there."""
