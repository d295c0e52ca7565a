"""Where the experts of a MoE layer are, and how tokens reach them: see `dispatch`."""

from parallel.expert.choose import expert_dispatch
from parallel.expert.dispatch import ExpertDispatch, LocalDispatch, RoutedTokens

__all__ = ["ExpertDispatch", "LocalDispatch", "RoutedTokens", "expert_dispatch"]
