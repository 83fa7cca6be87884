"""The statements and expressions of Python, evaluated abstractly.

Both branches of an `if` are executed, and loops twice. What calls, attributes and products do with values is up to a
subclass.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from hf_lowprec.casting.hooks.flow_values import PLAIN, Value, any_of, promoted

Environment = dict[str, Value]
"""Local variable → its value."""


class NotUnderstood(Exception):
    """The code has statements or expressions that are not evaluated."""


class SourceEvaluation(ABC):
    """Evaluates the source of a function."""

    @abstractmethod
    def attribute(self, base: Value, name: str) -> Value:
        """The value of an attribute."""

    @abstractmethod
    def call(
        self,
        function: ast.expr,
        arguments: Sequence[ast.expr],
        keywords: Sequence[ast.keyword],
        env: Environment,
    ) -> Value:
        """The value of a call."""

    @abstractmethod
    def product(self, operands: Sequence[Value]) -> Value:
        """The value of a matrix product."""

    @abstractmethod
    def exclude(self, values: Iterable[Value]) -> None:
        """Take note that `values` go where they cannot be followed."""

    # Statements

    def execute(self, statements: Sequence[ast.stmt], env: Environment) -> None:
        for statement in statements:
            self.statement(statement, env)

    def statement(self, node: ast.stmt, env: Environment) -> None:
        match node:
            case ast.Expr(value) | ast.Assert(value):
                self.value(value, env)
            case ast.Return(value):
                self.value(value, env)
            case ast.Assign(targets, value):
                self.assign_all(targets, value, env)
            case ast.AnnAssign(target, _, value):
                if value is not None:
                    self.assign_all([target], value, env)
            case ast.AugAssign(target, op, value):
                read = ast.copy_location(ast.BinOp(_as_read(target), op, value), node)
                self.assign_all([target], read, env)
            case ast.If(test, body, orelse):
                self.value(test, env)
                self.branches([body, orelse], env)
            case ast.For(target, iterable, body, orelse):
                items = self.value(iterable, env)
                for _ in range(2):  # what one round assigns, the next one reads
                    before = dict(env)
                    self.assign(target, items, env)
                    self.execute(body, env)
                    _join(env, before)
                self.execute(orelse, env)
            case ast.While(test, body, orelse):
                for _ in range(2):
                    before = dict(env)
                    self.value(test, env)
                    self.execute(body, env)
                    _join(env, before)
                self.execute(orelse, env)
            case ast.With(items=managers, body=body):
                for manager in managers:
                    entered = self.value(manager.context_expr, env)
                    if manager.optional_vars is not None:
                        self.assign(manager.optional_vars, entered, env)
                self.execute(body, env)
            case (
                ast.Raise() | ast.Delete() | ast.Pass() | ast.Break() | ast.Continue() | ast.Import() | ast.ImportFrom()
            ):
                pass
            case _:
                raise NotUnderstood

    def branches(self, bodies: Sequence[Sequence[ast.stmt]], env: Environment) -> None:
        """Execute each body from the same state, and go on with what either of them leaves."""
        ends = []
        for body in bodies:
            after = dict(env)
            self.execute(body, after)
            if not (body and isinstance(body[-1], ast.Return | ast.Raise)):
                ends.append(after)
        for number, end in enumerate(ends):
            if number:
                _join(env, end)
            else:
                env.clear()
                env.update(end)

    def assign_all(self, targets: Sequence[ast.expr], value: ast.expr, env: Environment) -> None:
        for target in targets:
            if (
                isinstance(target, ast.Tuple)
                and isinstance(value, ast.Tuple)
                and len(target.elts) == len(value.elts)
                and not any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts))
            ):
                values = [self.value(item, env) for item in value.elts]
                for item, element in zip(target.elts, values, strict=True):
                    self.assign(item, element, env)
            else:
                self.assign(target, self.value(value, env), env)

    def assign(self, target: ast.expr, value: Value, env: Environment) -> None:
        match target:
            case ast.Name(name):
                env[name] = value
            case ast.Tuple(items) | ast.List(items):
                for item in items:
                    self.assign(item, value, env)
            case ast.Starred(inner):
                self.assign(inner, value, env)
            case ast.Subscript(ast.Name(name), ast.Constant(str())):  # an entry of a dict
                env[name] = env.get(name, PLAIN) | value
            case _:  # an attribute that other code reads, or a part of a tensor
                self.exclude([value])

    # Expressions

    def value(self, node: ast.expr | None, env: Environment) -> Value:
        match node:
            case None | ast.Constant():
                return PLAIN
            case ast.Name(name):
                return env.get(name, PLAIN)
            case ast.Attribute(base, name):
                return self.attribute(self.value(base, env), name)
            case ast.Subscript(base, index):
                self.value(index, env)
                return self.value(base, env)
            case ast.BinOp(left, op, right):
                operands = [self.value(left, env), self.value(right, env)]
                return self.product(operands) if isinstance(op, ast.MatMult) else promoted(operands)
            case ast.UnaryOp(_, operand) | ast.Starred(operand):
                return self.value(operand, env)
            case ast.NamedExpr(target, inner):
                value = self.value(inner, env)
                self.assign(target, value, env)
                return value
            case ast.BoolOp(_, operands):
                return any_of(self.value(operand, env) for operand in operands)
            case ast.IfExp(test, body, orelse):
                self.value(test, env)
                return self.value(body, env) | self.value(orelse, env)
            case ast.Compare(left, _, comparators):
                for operand in (left, *comparators):
                    self.value(operand, env)
                return PLAIN
            case ast.Tuple(items) | ast.List(items) | ast.Set(items):
                return any_of(self.value(item, env) for item in items)
            case ast.Dict(keys, values):
                return any_of(self.value(item, env) for item in (*keys, *values))
            case ast.Slice(lower, upper, step):
                return any_of(self.value(item, env) for item in (lower, upper, step))
            case ast.ListComp(element, loops) | ast.SetComp(element, loops) | ast.GeneratorExp(element, loops):
                return self.comprehension([element], loops, env)
            case ast.DictComp(key, element, loops):
                return self.comprehension([key, element], loops, env)
            case ast.JoinedStr(parts):
                for part in parts:
                    if isinstance(part, ast.FormattedValue):
                        self.value(part.value, env)
                return PLAIN
            case ast.Call(function, arguments, keywords):
                return self.call(function, arguments, keywords, env)
        raise NotUnderstood

    def comprehension(
        self, elements: Sequence[ast.expr], loops: Sequence[ast.comprehension], env: Environment
    ) -> Value:
        inner = dict(env)
        for loop in loops:
            self.assign(loop.target, self.value(loop.iter, inner), inner)
            for test in loop.ifs:
                self.value(test, inner)
        return any_of(self.value(element, inner) for element in elements)


def _join(env: Environment, other: Environment) -> None:
    """Let each variable have the value of either environment."""
    for name, value in other.items():
        env[name] = env[name] | value if name in env else value


def _as_read(target: ast.expr) -> ast.expr:
    """The expression that reads what an augmented assignment writes."""
    return ast.parse(ast.unparse(target), mode="eval").body
