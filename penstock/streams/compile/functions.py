"""The types and functions of Spark SQL that expressions may use, and why others are refused. Pure.

Only functions on this list are allowed, because a retried step must write the same records again, and unknown
functions may not be deterministic. Types follow Spark's ANSI rules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

# --- types -----------------------------------------------------------------------------------------------

INTEGRAL = frozenset({"tinyint", "smallint", "int", "bigint"})
NUMERIC = INTEGRAL | {"float", "double", "decimal"}
TIME = frozenset({"date", "timestamp"})
VOID = "void"  # the type of NULL
_WIDTH = {
    kind: width for width, kind in enumerate(("tinyint", "smallint", "int", "bigint", "float", "double"))
}
DATA_TYPES = {
    "TEXT": "string",
    "VARCHAR": "string",
    "CHAR": "string",
    "BIGINT": "bigint",
    "INT": "int",
    "SMALLINT": "smallint",
    "TINYINT": "tinyint",
    "DOUBLE": "double",
    "FLOAT": "float",
    "BOOLEAN": "boolean",
    "BINARY": "binary",
    "DECIMAL": "decimal",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMPTZ": "timestamp",
}
# Type -> types to which it cannot be cast (ANSI). All types can be cast from and to string.
_NO_CAST = {
    "binary": NUMERIC | TIME | {"boolean"},
    "boolean": TIME | {"binary"},
    "date": NUMERIC | {"boolean", "binary"},
    "timestamp": frozenset({"boolean", "binary"}),
    **dict.fromkeys(NUMERIC, frozenset({"binary", "date"})),
}


def common_type(types: Sequence[str]) -> str | None:
    """The type that holds all of these without a cast from or to string; None if there is none."""
    return reduce(lambda left, right: left and _wider(left, right), types, VOID) or None


def _wider(left: str, right: str) -> str:
    if left == right or right == VOID:
        return left
    if left == VOID:
        return right
    if left in NUMERIC and right in NUMERIC:
        if "decimal" in (left, right):
            return "double" if {"float", "double"} & {left, right} else "decimal"
        wider = max(left, right, key=_WIDTH.__getitem__)
        # A float cannot represent every int, so Spark uses double.
        return "double" if wider == "float" else wider
    return "timestamp" if {left, right} == TIME else ""


def can_cast(source: str, target: str) -> bool:
    """True if CAST can convert the one type to the other."""
    if source.startswith("array<"):
        return target == "string"
    return target not in _NO_CAST.get(source, frozenset())


def can_compare(left: str, right: str) -> bool:
    """True if values of these types can be compared; ts > '2026-01-01' compares times."""
    return common_type([left, right]) is not None or (
        bool({left, right} & TIME) and "string" in (left, right)
    )


def element_of(array: str) -> str:
    """The type of an array's elements."""
    return array.removeprefix("array<").removesuffix(">")


# --- functions -------------------------------------------------------------------------------------------

# Kinds of arguments. `r`: an array, `p`: any type with a text form, `a`: any type,
# `k`: a literal number, `j`: an int, but not a bigint.
_KINDS: dict[str, tuple[str, frozenset[str]]] = {
    "s": ("string", frozenset({"string"})),
    "n": ("a number", NUMERIC),
    "i": ("int or bigint", INTEGRAL),
    "j": ("int", INTEGRAL - {"bigint"}),
    "k": ("a whole number", INTEGRAL),
    "b": ("boolean", frozenset({"boolean"})),
    "x": ("binary", frozenset({"binary"})),
    "sx": ("string or binary", frozenset({"string", "binary"})),
    "t": ("a date or timestamp", TIME),
    "d": ("a date", frozenset({"date"})),
    "m": ("a timestamp", frozenset({"timestamp"})),
    "ts": ("a date, timestamp or string", TIME | {"string"}),
    "p": ("string, a number, boolean or a time", NUMERIC | TIME | {"string", "boolean"}),
    "o": ("string, a number or boolean", NUMERIC | {"string", "boolean"}),
    "h": ("string, a whole number, boolean or binary", INTEGRAL | {"string", "boolean", "binary"}),
    "f": ("a number from 0 to 1", NUMERIC),
}

# name(kinds) -> result; "?": optional, "*": any number. Results that are not types depend on the arguments.
_SIGNATURES = """
lower(s) -> string                  upper(s) -> string                  lcase(s) -> string
ucase(s) -> string                  ltrim(s,s?) -> string               rtrim(s,s?) -> string
btrim(s,s?) -> string               initcap(s) -> string                length(sx) -> int
char_length(sx) -> int              character_length(sx) -> int         len(sx) -> int
octet_length(sx) -> int             bit_length(sx) -> int               ascii(s) -> int
reverse(s) -> string                left(s,i) -> string                 right(s,i) -> string
lpad(s,i,s?) -> string              rpad(s,i,s?) -> string              repeat(s,i) -> string
space(i) -> string                  chr(i) -> string                    char(i) -> string
replace(s,s,s?) -> string           translate(s,s,s) -> string          substring_index(s,s,i) -> string
concat(p*) -> string                concat_ws(s,p*) -> string           format_string(s,p*) -> string
instr(s,s) -> int                   locate(s,s,i?) -> int               find_in_set(s,s) -> int
levenshtein(s,s) -> int             contains(s,s) -> boolean            startswith(s,s) -> boolean
endswith(s,s) -> boolean            soundex(s) -> string                split(s,s,i?) -> array<string>
split_part(s,s,i) -> string         regexp_extract(s,s,i?) -> string    regexp_replace(s,s,s,k?) -> string
regexp_like(s,s) -> boolean         rlike(s,s) -> boolean               regexp_count(s,s) -> int
regexp_instr(s,s) -> int            regexp_substr(s,s) -> string        url_encode(s) -> string
url_decode(s) -> string             parse_url(s,s,s?) -> string         get_json_object(s,s) -> string
json_array_length(s) -> int         conv(s,i,i) -> string               md5(sx) -> string
sha(sx) -> string                   sha1(sx) -> string                  sha2(sx,i) -> string
crc32(sx) -> bigint                 hash(a,a*) -> int                   xxhash64(a,a*) -> bigint
base64(sx) -> string                unbase64(s) -> binary               hex(a) -> string
unhex(s) -> binary                  encode(s,s) -> binary               decode(x,s) -> string
bin(i) -> string                    format_number(n,j) -> string

abs(n) -> first                     negative(n) -> first                positive(n) -> first
round(n,k?) -> first                bround(n,k?) -> first               ceil(n) -> whole
ceiling(n) -> whole                 floor(n) -> whole                   mod(n,n) -> common
pmod(n,n) -> common                 greatest(a,a,a*) -> common          least(a,a,a*) -> common
try_add(n,n) -> common              try_subtract(n,n) -> common         try_multiply(n,n) -> common
try_divide(n,n) -> ratio            sqrt(n) -> double                   cbrt(n) -> double
exp(n) -> double                    expm1(n) -> double                  ln(n) -> double
log(n,n?) -> double                 log2(n) -> double                   log10(n) -> double
log1p(n) -> double                  pow(n,n) -> double                  power(n,n) -> double
hypot(n,n) -> double                sin(n) -> double                    cos(n) -> double
tan(n) -> double                    asin(n) -> double                   acos(n) -> double
atan(n) -> double                   atan2(n,n) -> double                degrees(n) -> double
radians(n) -> double                rint(n) -> double                   sign(n) -> double
signum(n) -> double                 pi() -> double                      e() -> double
isnan(n) -> boolean                 bit_count(i) -> int                 shiftleft(i,i) -> first
shiftright(i,i) -> first            factorial(i) -> bigint

coalesce(a,a*) -> common            nvl(a,a) -> common                  ifnull(a,a) -> common
nullif(a,a) -> first                nvl2(a,a,a) -> choice               isnull(a) -> boolean
isnotnull(a) -> boolean             equal_null(a,a) -> boolean          string(a) -> string
bigint(a) -> bigint                 int(a) -> int                       double(a) -> double
float(a) -> float                   boolean(a) -> boolean               binary(sx) -> binary
date(ts) -> date                    timestamp(ts) -> timestamp

to_timestamp(ts,s?) -> timestamp    to_date(ts,s?) -> date              date_format(ts,s) -> string
unix_timestamp(ts,s?) -> bigint     to_unix_timestamp(ts,s?) -> bigint  from_unixtime(i,s?) -> string
unix_seconds(m) -> bigint           unix_millis(m) -> bigint            unix_micros(m) -> bigint
unix_date(d) -> int                 timestamp_seconds(n) -> timestamp   timestamp_millis(i) -> timestamp
timestamp_micros(i) -> timestamp    date_trunc(s,ts) -> timestamp       trunc(ts,s) -> date
last_day(ts) -> date                date_add(ts,j) -> date              date_sub(ts,j) -> date
add_months(ts,i) -> date            datediff(ts,ts) -> int              date_diff(ts,ts) -> int
months_between(ts,ts,b?) -> double  make_date(i,i,i) -> date            year(ts) -> int
quarter(ts) -> int                  month(ts) -> int                    day(ts) -> int
dayofmonth(ts) -> int               dayofweek(ts) -> int                dayofyear(ts) -> int
weekday(ts) -> int                  weekofyear(ts) -> int               hour(ts) -> int
minute(ts) -> int                   second(ts) -> int
from_utc_timestamp(ts,s) -> timestamp                                   to_utc_timestamp(ts,s) -> timestamp

array(a*) -> array                  size(r) -> int                      array_size(r) -> int
cardinality(r) -> int               element_at(r,j) -> element          get(r,i) -> element
array_contains(r,a) -> boolean      array_join(r,s,s?) -> string        to_json(r) -> string
"""
_COMPARING = ("nullif", "equal_null", "array_contains")
_SIGNATURE = re.compile(r"(\w+)\(([^)]*)\) -> (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """The signature of a function."""

    name: str
    kinds: tuple[str, ...]  # of the required and optional arguments
    required: int
    rest: str | None  # the kind of further arguments
    result: str

    @property
    def compares(self) -> bool:
        """True if it compares its arguments."""
        return self.name in _COMPARING

    def kind_of(self, index: int) -> str | None:
        """The kind of argument `index`; None: there is no such argument."""
        return self.kinds[index] if index < len(self.kinds) else self.rest

    def usage(self) -> str:
        """The call syntax, for error texts."""
        words = [
            _word(kind) + ("" if at < self.required else " (optional)") for at, kind in enumerate(self.kinds)
        ]
        if self.rest is not None:
            words.append("…")
        return f"{self.name}({', '.join(words)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """Why a function of Spark is not allowed, and what to use instead."""

    why: str
    fix: str


def accepts(kind: str, type_: str) -> bool:
    """True if an argument of this kind may have this type. NULL is always allowed."""
    if kind == "a" or type_ == VOID:
        return True
    if kind == "r":
        return type_.startswith("array<")
    return type_ in _KINDS[kind][1]


def is_constant(kind: str) -> bool:
    """True if Spark requires a literal."""
    return kind in ("k", "f")


def _word(kind: str) -> str:
    return {"a": "anything", "r": "an array"}.get(kind) or _KINDS[kind][0]


def describe_kind(kind: str) -> str:
    """The types of a kind, as text."""
    return _word(kind)


def _read_signatures(text: str) -> dict[str, Function]:
    functions = {}
    for name, arguments, result in _SIGNATURE.findall(text):
        kinds = [kind for kind in arguments.split(",") if kind]
        rest = next((kind[:-1] for kind in kinds if kind.endswith("*")), None)
        fixed = [kind for kind in kinds if not kind.endswith("*")]
        required = sum(not kind.endswith("?") for kind in fixed)
        functions[name] = Function(
            name=name,
            kinds=tuple(kind.rstrip("?") for kind in fixed),
            required=required,
            rest=rest,
            result=result,
        )
    return functions


FUNCTIONS = _read_signatures(_SIGNATURES)

# The functions of a flat_map: (keeps a record with an empty or NULL array, also gives the position).
GENERATORS = {
    "explode": (False, False),
    "explode_outer": (True, False),
    "posexplode": (False, True),
    "posexplode_outer": (True, True),
}

# The functions of a window, as signatures. `total`: integers give bigint, others double.
AGGREGATES = _read_signatures("""
count(a?) -> bigint                 sum(n) -> total                     min(o) -> first
max(o) -> first                     avg(n) -> double                    mean(n) -> double
approx_count_distinct(h) -> bigint  approx_percentile(n,f) -> first     percentile_approx(n,f) -> first
""")
# Alias -> the name in a plan.
AGGREGATE_NAMES = {"mean": "avg", "percentile_approx": "approx_percentile"}


def _names(text: str) -> Sequence[str]:
    return text.split()


_UNREPEATABLE = _names(
    "rand randn random randstr uniform uuid shuffle now current_timestamp current_date current_time "
    "curdate localtimestamp current_timezone monotonically_increasing_id spark_partition_id "
    "input_file_name input_file_block_start input_file_block_length current_user session_user user "
    "current_database current_schema current_catalog version sleep"
)
_AGGREGATES = _names(
    "count sum avg mean min max first first_value last last_value any_value count_if count_min_sketch "
    "stddev std stddev_pop stddev_samp variance var_pop var_samp corr covar_pop covar_samp collect_list "
    "collect_set array_agg listagg string_agg approx_count_distinct approx_percentile percentile "
    "percentile_approx percentile_cont percentile_disc median mode max_by min_by every some any all "
    "bool_and bool_or bit_and bit_or bit_xor kurtosis skewness histogram_numeric grouping grouping_id "
    "try_sum try_avg regr_count product"
)
_WINDOWS = _names(
    "row_number rank dense_rank percent_rank cume_dist ntile lag lead nth_value window session_window "
    "window_time"
)
_GENERATORS = _names(
    "explode explode_outer posexplode posexplode_outer inline inline_outer stack json_tuple variant_explode"
)
_UNSAFE = _names(
    "reflect java_method try_reflect raise_error assert_true from_avro to_avro from_protobuf "
    "to_protobuf ai_query call_function http_get read_files aes_encrypt try_aes_decrypt aes_decrypt sql"
)

DENIED: dict[str, Denied] = {
    **dict.fromkeys(
        _UNREPEATABLE,
        Denied(
            why="a step is retried after a crash and must give the same records, but "
            "this function is not deterministic",
            fix="take the value from a column of the record (its event time, its own id)",
        ),
    ),
    **dict.fromkeys(
        _AGGREGATES,
        Denied(
            why="an aggregate needs many records, and this step sees one at a time",
            fix="bring records together: .key_by(...).window(...).aggregate(...), or .process(a Computation)",
        ),
    ),
    **dict.fromkeys(
        _WINDOWS,
        Denied(
            why="a window needs many records, and this step sees one at a time",
            fix="use .key_by(...).window(...).aggregate(...), or a Computation with a timer",
        ),
    ),
    **dict.fromkeys(
        _GENERATORS,
        Denied(
            why="it makes several records from one, but this step makes at most one",
            fix='use .flat_map("explode(array) AS name"), in SQL LATERAL VIEW explode(array) t AS name',
        ),
    ),
    **dict.fromkeys(
        _UNSAFE,
        Denied(
            why="it accesses data outside of the record (JVM, files, network, secrets), or stops the task",
            fix="use a Computation, or do it before the records are published",
        ),
    ),
}
