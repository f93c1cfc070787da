"""The graph that a family is traced to, and what every pass rewrites."""

from .builder import Builder, GradientBuilder
from .graph import Graph, Node, Region, Value
from .spec import SpecError, check

__all__ = ["Builder", "GradientBuilder", "Graph", "Node", "Region", "SpecError", "Value", "check"]
