"""The types of parsed Spark SQL expressions by Spark's ANSI rules, and the columns that they read. Pure: no
JVM.

Stricter than Spark for errors that Spark finds only at run time, such as comparing a string with a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from sqlglot import exp

from penstock.core.errors import PipelineError
from penstock.streams.catalogue import nearest
from penstock.streams.compile.functions import (
    DATA_TYPES,
    DENIED,
    FUNCTIONS,
    INTEGRAL,
    VOID,
    Function,
    accepts,
    can_cast,
    can_compare,
    common_type,
    describe_kind,
    element_of,
    is_constant,
)

_CASTS = {"s": "string", "p": "string", "sx": "string", "n": "double", "i": "bigint", "j": "int"}
_ONE_BY_ONE = "columns must be listed, so that a new column upstream does not change the result"
_BOOLEAN_PAIRS = (exp.And, exp.Or)
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ)
_ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Mod)
_BITWISE = (exp.BitwiseAnd, exp.BitwiseOr, exp.BitwiseXor)
_PATTERNS = (exp.Like, exp.ILike, exp.RegexpLike)
_QUERIES = (exp.Query, exp.Exists, exp.Command, exp.DDL, exp.DML)


class Typer:
    """Computes the types of expressions over given columns, and collects the columns that they read."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._columns = columns
        self.used: set[str] = set()

    def type_of(self, node: exp.Expression) -> str:
        """The Spark SQL type of an expression; PipelineError if it has none or may not be used."""
        match node:
            case exp.Column():
                return self._column(node)
            case exp.Paren():
                return self.type_of(node.this)
            case exp.Literal() | exp.RawString() | exp.HexString() | exp.Boolean() | exp.Null():
                return _literal(node)
            case exp.Anonymous():
                return self._function(node)
            case exp.Cast():  # TryCast is one too
                return self._cast(node)
            case exp.Case():
                return self._case(node)
            case exp.If():
                return self._if(node)
            case exp.Not():
                return self._all(node, [node.this], "boolean", "b")
            case exp.Is():
                return self._is(node)
            case exp.In() | exp.Between():
                return self._among(node)
            case exp.Escape():
                return self.type_of(node.this)
            case exp.Neg():
                return self._number(node, [node.this])
            case exp.BitwiseNot():
                return self._all(node, [node.this], "first", "i")
            case exp.BitwiseLeftShift() | exp.BitwiseRightShift():
                return self._all(node, [node.this, node.expression], "first", "i")
            case exp.Div() | exp.IntDiv():
                return self._division(node)
            case exp.Concat() | exp.DPipe():
                return self._all(node, node.expressions or [node.this, node.expression], "string", "p")
            case exp.Trim():
                return self._all(node, [node.this, node.expression], "string", "s")
            case exp.StrPosition():
                return self._all(node, [node.this, node.args.get("substr")], "int", "s")
            case exp.Substring():
                return self._substring(node)
            case exp.Extract():
                self._all(node, [node.expression], "int", "ts")
                return "decimal" if node.name.lower() in ("second", "seconds") else "int"
            case exp.Bracket():
                return self._bracket(node)
            case _:
                return self._by_family(node)

    def _by_family(self, node: exp.Expression) -> str:
        pair = [node.this, node.args.get("expression")]
        if isinstance(node, _BOOLEAN_PAIRS):
            return self._all(node, pair, "boolean", "b")
        if isinstance(node, _COMPARISONS):
            return self._compare(node, pair)
        if isinstance(node, _PATTERNS):
            return self._all(node, pair, "boolean", "s")
        if isinstance(node, _ARITHMETIC):
            return self._number(node, pair)
        if isinstance(node, _BITWISE):
            return self._all(node, pair, "common", "i")
        _refuse_syntax(node)

    def _column(self, node: exp.Column) -> str:
        parts = [part.name for part in node.parts]
        name = ".".join(parts)
        if isinstance(node.this, exp.Star):
            raise PipelineError(
                "'*' cannot be used here",
                why=_ONE_BY_ONE,
                fix=f"write the columns you want: {', '.join(self._columns)}",
            )
        if len(parts) == 1 and name in self._columns:
            self.used.add(name)
            return self._columns[name]
        there = ", ".join(f"{column} ({kind})" for column, kind in self._columns.items())
        if name.startswith("_"):
            raise PipelineError(
                f"column {name!r} cannot be used",
                why="names that start with '_' are reserved for system columns; "
                f"the columns here are {there}",
                fix="use one of these columns",
            )
        near = nearest(name, self._columns)
        raise PipelineError(
            f"there is no column {name!r}",
            why=f"the columns here are {there}",
            fix=f"did you mean {near!r}?"
            if near
            else "use one of these columns; text is written in quotes: 'text'",
        )

    def _function(self, node: exp.Anonymous) -> str:
        name = node.name.lower()
        if name in DENIED:
            raise PipelineError(f"{name}() cannot be used here", why=DENIED[name].why, fix=DENIED[name].fix)
        function = FUNCTIONS.get(name)
        if function is None:
            near = nearest(name, FUNCTIONS)
            raise PipelineError(
                f"the function {name}() is not known",
                why="a step may only use functions that Penstock knows to give the same result each time",
                fix=f"did you mean {near}()?"
                if near
                else "do it in a Computation: .key_by(...).process(...)",
            )
        types = [self.type_of(argument) for argument in node.expressions]
        _check_arguments(function, node.expressions, types)
        if function.compares:
            against = [element_of(types[0]), *types[1:]] if name == "array_contains" else types
            _check_comparable(node, node.expressions, against)
        return self._result(node, function.result, types)

    def aggregated(self, node: exp.Expression, function: Function) -> str:
        """The type an aggregate gives for its arguments."""
        types = [self.type_of(argument) for argument in node.expressions]
        _check_arguments(function, node.expressions, types)
        return self._result(node, function.result, types)

    def _result(self, node: exp.Expression, result: str, types: Sequence[str]) -> str:
        match result:
            case "first":
                return types[0]
            case "common" | "choice":
                given = types if result == "common" else types[1:]
                return common_type(given) or _no_common(node, given)
            case "array":
                return f"array<{common_type(types) or _no_common(node, types)}>"
            case "element":
                return element_of(types[0])
            case "whole":
                return "decimal" if types[0] == "decimal" else "bigint"
            case "total":
                return "bigint" if types[0] in INTEGRAL else "double"
            case "ratio":
                return "decimal" if common_type(types) == "decimal" else "double"
        return result

    def _all(
        self, node: exp.Expression, operands: Sequence[exp.Expression | None], result: str, kind: str
    ) -> str:
        given = [operand for operand in operands if operand is not None]
        types = [self.type_of(operand) for operand in given]
        for operand, type_ in zip(given, types, strict=True):
            if not accepts(kind, type_):
                _wrong_type(_sql(node), f"needs {describe_kind(kind)}", operand, type_, kind)
        return self._result(node, result, types)

    def _number(self, node: exp.Expression, operands: Sequence[exp.Expression | None]) -> str:
        return self._all(node, operands, "common", "n")

    def _division(self, node: exp.Expression) -> str:
        pair = [node.this, node.args.get("expression")]
        if isinstance(node, exp.IntDiv):
            return self._all(node, pair, "bigint", "i")
        return self._all(node, pair, "ratio", "n")

    def _compare(self, node: exp.Expression, operands: Sequence[exp.Expression | None]) -> str:
        given = [operand for operand in operands if operand is not None]
        types = [self.type_of(operand) for operand in given]
        _check_comparable(node, given, types)
        return "boolean"

    def _among(self, node: exp.Expression) -> str:
        if node.args.get("query") is not None:
            _refuse_syntax(node.args["query"])
        return self._compare(
            node, [node.this, *node.expressions, node.args.get("low"), node.args.get("high")]
        )

    def _is(self, node: exp.Is) -> str:
        if isinstance(node.expression, exp.Boolean):
            return self._all(node, [node.this], "boolean", "b")
        if not isinstance(node.expression, exp.Null):
            _refuse_syntax(node)
        self.type_of(node.this)
        return "boolean"

    def _case(self, node: exp.Case) -> str:
        branches = [branch.args["true"] for branch in node.args["ifs"]]
        conditions = [branch.this for branch in node.args["ifs"]]
        if node.this is None:
            for condition in conditions:
                self._all(node, [condition], "boolean", "b")
        else:
            self._compare(node, [node.this, *conditions])
        default = node.args.get("default")
        types = [self.type_of(branch) for branch in (*branches, default) if branch is not None]
        return common_type(types) or _no_common(node, types)

    def _if(self, node: exp.If) -> str:
        if node.args.get("false") is None:
            raise PipelineError(
                f"if() lacks its third argument in {_sql(node)}",
                why="if(condition, then, otherwise) always gives a value",
                fix="add the third argument, for example NULL",
            )
        self._all(node, [node.this], "boolean", "b")
        types = [self.type_of(node.args["true"]), self.type_of(node.args["false"])]
        return common_type(types) or _no_common(node, types)

    def _cast(self, node: exp.Cast) -> str:
        source, target = self.type_of(node.this), DATA_TYPES.get(node.to.this.name, "")
        if not target:
            raise PipelineError(
                f"CAST to {node.to.sql(dialect='spark')} cannot be used here",
                why=f"known types: {', '.join(sorted(set(DATA_TYPES.values())))}",
                fix="cast to one of these types",
            )
        if not can_cast(source, target):
            raise PipelineError(
                f"{source} cannot be cast to {target} in {_sql(node)}",
                why="Spark has no such conversion",
                fix="cast to string first, or use a conversion function",
            )
        return target

    def _substring(self, node: exp.Substring) -> str:
        result = self._all(node, [node.this], "first", "sx")
        self._all(node, [node.args.get("start"), node.args.get("length")], "int", "i")
        return result

    def _bracket(self, node: exp.Bracket) -> str:
        array = self.type_of(node.this)
        if not array.startswith("array<") or len(node.expressions) != 1:
            _wrong_type(_sql(node), "needs an array before the brackets", node.this, array, "")
        self._all(node, node.expressions, "int", "i")
        return element_of(array)


def _literal(node: exp.Expression) -> str:
    match node:
        case exp.RawString():
            return "string"
        case exp.HexString():
            return "binary"
        case exp.Boolean():
            return "boolean"
        case exp.Null():
            return VOID
    text = node.name
    if node.args.get("is_string"):
        return "string"
    if text.isdigit():
        return "int" if int(text) < 2**31 else "bigint" if int(text) < 2**63 else "decimal"
    return "double" if "e" in text.lower() else "decimal"


def _sql(node: exp.Expression) -> str:
    return node.sql(dialect="spark")


def _check_arguments(function: Function, arguments: Sequence[exp.Expression], types: Sequence[str]) -> None:
    allowed = len(function.kinds) if function.rest is None else len(arguments)
    if not function.required <= len(arguments) <= allowed:
        raise PipelineError(
            f"{function.name}() does not take {len(arguments)} argument{'s' * (len(arguments) != 1)}",
            why=f"it is called as {function.usage()}",
            fix="give it these arguments",
        )
    for index, (argument, type_) in enumerate(zip(arguments, types, strict=True)):
        kind = function.kind_of(index)
        if kind is not None and is_constant(kind) and not _is_number(argument):
            raise PipelineError(
                f"{function.name}() needs a number written out as argument {index + 1}, not {_sql(argument)}",
                why="Spark takes no column here",
                fix="write the number",
            )
        if kind is not None and not accepts(kind, type_):
            needs = f"needs {describe_kind(kind)} as argument {index + 1}"
            _wrong_type(f"{function.name}()", needs, argument, type_, kind)


def _is_number(node: exp.Expression) -> bool:
    value = node.this if isinstance(node, exp.Neg) else node
    return isinstance(value, exp.Literal) and not value.is_string


def _check_comparable(node: exp.Expression, operands: Sequence[exp.Expression], types: Sequence[str]) -> None:
    first = types[0]
    for operand, type_ in zip(operands[1:], types[1:], strict=True):
        if not can_compare(first, type_):
            raise PipelineError(
                f"{first} and {type_} cannot be compared in {_sql(node)}",
                why="Spark would convert one of them, and fail at the first record that cannot be converted",
                fix=f"convert one of them: CAST({_sql(operand)} AS {first}) or "
                f"CAST({_sql(operands[0])} AS {type_})",
            )


def _wrong_type(where: str, needs: str, operand: exp.Expression, type_: str, kind: str) -> NoReturn:
    target = _CASTS.get(kind)
    text = _sql(operand)
    if kind == "b":
        fix = f"compare it with something, for example {text} IS NOT NULL"
    else:
        fix = f"wrap it in CAST({text} AS {target})" if target else "use a value of that type"
    raise PipelineError(f"{where} {needs}, and {text} is {type_}", why="the types do not fit", fix=fix)


def _no_common(node: exp.Expression, types: Sequence[str]) -> NoReturn:
    kinds = ", ".join(dict.fromkeys(types))
    raise PipelineError(
        f"the values in {_sql(node)} have different types: {kinds}",
        why="the result must have one type",
        fix="wrap them in CAST(... AS string), or another type",
    )


def _refuse_syntax(node: exp.Expression) -> NoReturn:
    text = _sql(node)
    if isinstance(node, _QUERIES):
        raise PipelineError(
            f"a query cannot be used inside a step: {text}",
            why="a step processes one record, and the content of a table could change between retries",
            fix="write only the expression, and read other data as a stream",
        )
    if isinstance(node, exp.Window | exp.Filter | exp.Distinct | exp.WithinGroup):
        denied = DENIED["window" if isinstance(node, exp.Window) else "sum"]
        raise PipelineError(f"{text} cannot be used here", why=denied.why, fix=denied.fix)
    if isinstance(node, exp.Star):
        raise PipelineError(
            "'*' cannot be used here",
            why=_ONE_BY_ONE,
            fix="write the columns you want",
        )
    name = type(node).__name__
    if name.startswith(("Current", "Session", "Localtime")):
        denied = DENIED["now"]
        raise PipelineError(f"{text} cannot be used here", why=denied.why, fix=denied.fix)
    raise PipelineError(
        f"{text!r} cannot be used in a step",
        why=f"Penstock cannot check this part of SQL ({name}) without Spark",
        fix="use functions and operators on columns, or a Computation",
    )
