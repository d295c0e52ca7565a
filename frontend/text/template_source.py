"""What a chat template reads and writes, from its syntax tree."""

from collections.abc import Iterator
from functools import cached_property

from jinja2 import nodes

__all__ = ["TemplateSource"]

_MESSAGES = "messages"
_ARGUMENTS = "arguments"
# Filters and methods that use all fields of a message.
_WHOLE = frozenset({"dictsort", "items", "pprint", "string", "tojson", "values", "xmlattr"})


class TemplateSource:
    """Facts about one template. Variables are followed through loops, assignments and macros."""

    def __init__(self, tree: nodes.Template):
        self._tree = tree
        self._messages = {_MESSAGES}
        """Variables that hold messages: a list or one of them."""
        size = 0
        while size < len(self._messages):
            size = len(self._messages)
            self._follow()

    def reads(self, field: str) -> bool:
        """Whether the template may read this field of a message."""
        return not self._fields or field in self._fields or not _WHOLE.isdisjoint(self._fields)

    def names_role(self, role: str) -> bool:
        """Whether the template compares something with this string."""
        return role in self._compared

    def writes(self, text: str) -> bool:
        """Whether `text` is part of the template's own output."""
        return any(text in literal for literal in self._literals)

    def searches(self, text: str) -> bool:
        """Whether the template searches for `text`, as in `'</think>' in content`."""
        return text in self._searched

    def reads_variable(self, name: str) -> bool:
        """Whether the template reads the variable `name`, such as `tools`."""
        return any(node.name == name and node.ctx == "load" for node in self._tree.find_all(nodes.Name))

    @cached_property
    def tests_content_for_none(self) -> bool:
        """Whether the template tests a message's content for none, as DeepSeek V3 does before tool calls."""
        return any(
            test.name == "none" and _field(test.node) == "content" for test in self._tree.find_all(nodes.Test)
        )

    @cached_property
    def joins_arguments(self) -> bool:
        """Whether the template writes the arguments of tool calls as they are: as text."""
        operands: list[nodes.Node] = []
        for node in self._tree.find_all((nodes.Add, nodes.Concat, nodes.Output)):
            operands += [node.left, node.right] if isinstance(node, nodes.Add) else node.nodes  # type: ignore[attr-defined]
        return any(_field(operand) == _ARGUMENTS for operand in operands) and not (
            self._encodes_arguments or self._iterates_arguments
        )

    @cached_property
    def needs_argument_fields(self) -> bool:
        """Whether the template takes the arguments of tool calls only as an object."""
        return self._iterates_arguments and not self._encodes_arguments

    @cached_property
    def _encodes_arguments(self) -> bool:
        filters = self._tree.find_all(nodes.Filter)
        tests = self._tree.find_all(nodes.Test)
        return any(node.name == "tojson" and self._is_arguments(node.node) for node in filters) or any(
            node.name in ("string", "mapping") and self._is_arguments(node.node) for node in tests
        )

    @cached_property
    def _iterates_arguments(self) -> bool:
        for node in self._tree.find_all((nodes.Filter, nodes.Getattr)):
            name = node.name if isinstance(node, nodes.Filter) else node.attr  # type: ignore[attr-defined]
            if name in ("items", "keys", "dictsort") and self._is_arguments(node.node):  # type: ignore[attr-defined]
                return True
        return any(self._is_arguments(loop.iter) for loop in self._tree.find_all(nodes.For))

    def _is_arguments(self, node: nodes.Node | None) -> bool:
        """Whether `node` is the arguments of a tool call, or a variable with them."""
        if isinstance(node, nodes.Name):
            return any(
                isinstance(assign.target, nodes.Name)
                and assign.target.name == node.name
                and _field(assign.node) == _ARGUMENTS
                for assign in self._tree.find_all(nodes.Assign)
            )
        return _field(node) == _ARGUMENTS

    @cached_property
    def _constants(self) -> frozenset[str]:
        found = self._tree.find_all(nodes.Const)
        return frozenset(node.value for node in found if isinstance(node.value, str))

    @cached_property
    def _compared(self) -> frozenset[str]:
        found = [
            node for compare in self._tree.find_all(nodes.Compare) for node in compare.find_all(nodes.Const)
        ]
        return frozenset(node.value for node in found if isinstance(node.value, str))

    @cached_property
    def _literals(self) -> frozenset[str]:
        return self._constants.union(node.data for node in self._tree.find_all(nodes.TemplateData))

    @cached_property
    def _searched(self) -> frozenset[str]:
        found: set[str] = set()
        for node in self._tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
            if isinstance(node, nodes.Compare):
                operands = [node.expr, *(operand.expr for operand in node.ops)]
            else:
                operands = [*(node.args or ())]  # type: ignore[attr-defined]
            found.update(_strings(operands))
        return frozenset(found)

    @cached_property
    def writes_roles(self) -> bool:
        """Whether the template writes the roles of messages as they are."""
        return any(
            field == "role"
            for output in self._tree.find_all(nodes.Output)
            for field in self._fields_in(output)
        )

    @cached_property
    def _fields(self) -> frozenset[str]:
        return frozenset(self._fields_in(self._tree))

    def _fields_in(self, root: nodes.Node) -> Iterator[str]:
        """The fields of messages that are read below `root`."""
        for node in root.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter, nodes.Call, nodes.Compare)):
            match node:
                case nodes.Getattr(node=owner, attr=name) if self._holds(owner):
                    yield name
                case nodes.Getitem(node=owner, arg=nodes.Const(value=str(name))) if self._holds(owner):
                    yield name
                case nodes.Filter(node=nodes.Expr() as owner, name=name) if self._holds(owner):
                    yield name
                    yield from _strings(node.args)
                    yield from _strings([pair.value for pair in node.kwargs])
                case nodes.Call(node=nodes.Getattr(node=owner, attr="get")) if self._holds(owner):
                    yield from _strings(node.args)
                case nodes.Compare(expr=nodes.Const(value=str(name)), ops=[nodes.Operand(expr=owner)]):
                    if self._holds(owner):  # 'name' in message
                        yield name

    def _holds(self, node: nodes.Node | None) -> bool:
        """Whether the value of `node` is a message or a list of messages."""
        match node:
            case nodes.Name(name=name):
                return name in self._messages
            case nodes.NSRef(name=name, attr=attribute):
                return f"{name}.{attribute}" in self._messages
            case nodes.Getattr(node=nodes.Name(name=name), attr=attribute):
                return f"{name}.{attribute}" in self._messages or (
                    name == "loop" and attribute in ("previtem", "nextitem")
                )
            case nodes.Getitem(node=owner, arg=argument):
                return self._holds(owner) and not isinstance(getattr(argument, "value", None), str)
            case nodes.Filter(node=owner):
                return self._holds(owner)
            case nodes.CondExpr(expr1=first, expr2=second):
                return self._holds(first) or self._holds(second)
            case nodes.BinExpr(left=left, right=right):
                return self._holds(left) or self._holds(right)
        return False

    def _follow(self) -> None:
        for node in self._tree.find_all((nodes.For, nodes.Assign, nodes.Call)):
            match node:
                case nodes.For(iter=source, target=target) if self._holds(source):
                    self._messages.update(_targets(target))
                case nodes.Assign(node=source, target=target) if self._holds(source):
                    self._messages.update(_targets(target))
                case nodes.Call(node=nodes.Name(name=name), args=arguments):
                    for macro in self._tree.find_all(nodes.Macro):
                        if macro.name == name:
                            pairs = zip(macro.args, arguments, strict=False)
                            self._messages.update(own.name for own, given in pairs if self._holds(given))


def _field(node: nodes.Node | None) -> str | None:
    """The field that an expression reads from any value."""
    match node:
        case nodes.Getattr(attr=name):
            return str(name)
        case nodes.Getitem(arg=nodes.Const(value=str(name))):
            return name
    return None


def _targets(target: nodes.Node) -> Iterator[str]:
    match target:
        case nodes.Name(name=name):
            yield name
        case nodes.NSRef(name=name, attr=attribute):
            yield f"{name}.{attribute}"
        case nodes.Tuple(items=items):
            for item in items:
                yield from _targets(item)


def _strings(found: list[nodes.Expr]) -> Iterator[str]:
    for node in found:
        if isinstance(node, nodes.Const) and isinstance(node.value, str):
            yield node.value
