"""SQL text as tokens that know their line: read forward, cut into parts, put together again as text. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NoReturn

from sqlglot.errors import TokenError
from sqlglot.tokenizer_core import Token, TokenType

from penstock.core.errors import PipelineError
from penstock.streams.expressions import joined, tokens_of
from penstock.streams.graph import Place

_OPENING = {TokenType.L_PAREN: 1, TokenType.L_BRACKET: 1, TokenType.R_PAREN: -1, TokenType.R_BRACKET: -1}
# A word that ends an expression. LEFT and RIGHT are functions too.
CLAUSES = frozenset(
    {
        *(
            "FROM",
            "WHERE",
            "GROUP BY",
            "HAVING",
            "ORDER BY",
            "SORT BY",
            "CLUSTER BY",
            "DISTRIBUTE BY",
            "LIMIT",
        ),
        *(
            "OFFSET",
            "UNION",
            "EXCEPT",
            "INTERSECT",
            "MINUS",
            "LATERAL",
            "JOIN",
            "INNER",
            "LEFT",
            "RIGHT",
            "FULL",
        ),
        *("CROSS", "ANTI", "SEMI", "NATURAL", "ON", "USING", "QUALIFY", "PIVOT", "UNPIVOT", "TABLESAMPLE"),
    }
)


class Cursor:
    """A place in the tokens of one text. `line` is the number of its first line in the user's file."""

    def __init__(self, text: str, *, file: str, line: int = 1) -> None:
        self.text, self._file, self._line, self._at = text, file, line, 0
        try:
            self._tokens = tokens_of(text)
        except TokenError:
            raise PipelineError(
                f"{file}: the SQL does not parse",
                why="a quote (', \" or `) or a comment is opened and never closed",
                fix="close it; a quote inside text is written \\'",
            ) from None

    @property
    def is_done(self) -> bool:
        """True at the end of the text."""
        return self._at >= len(self._tokens)

    def word(self, ahead: int = 0) -> str:
        """The next token in capitals, "" at the end. What is quoted is never a word of the language."""
        number = self._at + ahead
        if number >= len(self._tokens):
            return ""
        token = self._tokens[number]
        quoted = token.token_type in (TokenType.IDENTIFIER, TokenType.STRING, TokenType.RAW_STRING)
        return "" if quoted else token.text.upper()

    def is_at(self, *words: str) -> bool:
        """True if these words come next."""
        return all(self.word(ahead) == word for ahead, word in enumerate(words))

    def take(self, *words: str) -> bool:
        """Pass these words, if they come next."""
        found = self.is_at(*words)
        self._at += len(words) * found
        return found

    def expect(self, *words: str, fix: str) -> None:
        """Pass these words, or tell that they are missing."""
        for word in words:
            if not self.take(word):
                self.fail(
                    f"{word} is expected{self._before()}", why="the statement is not complete here", fix=fix
                )

    def name(self, what: str) -> str:
        """A name: letters, or anything in backticks; parts with dots between them."""
        parts = []
        while True:
            if self.is_done or not (
                self._is_name() or self._tokens[self._at].token_type == TokenType.IDENTIFIER
            ):
                self.fail(
                    f"the name of {what} is expected{self._before()}", why="nothing like a name", fix="add it"
                )
            parts.append(self._tokens[self._at].text)
            self._at += 1
            if not self.take("."):
                return ".".join(parts)

    def _is_name(self) -> bool:
        return (
            bool(self.word())
            and (self.word()[0].isalpha() or self.word()[0] == "_")
            and " " not in self.word()
        )

    def expression(self, *ends: str) -> list[Token]:
        """Tokens up to the next clause, comma or closing bracket, or one of `ends`."""
        start, depth = self._at, 0
        while not self.is_done:
            token, word = self._tokens[self._at], self.word()
            step = _OPENING.get(token.token_type, 0)
            if depth == 0 and (step < 0 or word in (",", ";", *ends) or self._is_clause(start)):
                break
            depth += step
            self._at += 1
        if start == self._at:
            fix = "add one; a column that is called like a word of SQL goes into backticks"
            self.fail(f"an expression is expected{self._before()}", why="there is none", fix=fix)
        return self._tokens[start : self._at]

    def _is_clause(self, start: int) -> bool:
        word = self.word()
        if word in ("LEFT", "RIGHT") and self.word(1) == "(":
            return False
        before = self.word(-1) if self._at > start else ""
        return word in CLAUSES and not (word == "FROM" and before == "DISTINCT")

    def rest(self) -> Sequence[Token]:
        """What comes, unread."""
        return self._tokens[self._at :]

    def join(self, tokens: Sequence[Token], without: Container[int] = ()) -> str:
        """Text of these tokens but some, without comments."""
        return joined(tokens, self.text, without)

    def place(self, token: Token | None = None) -> Place:
        """The line of a token, or of the next one."""
        if token is None and self._tokens:
            token = self._tokens[min(self._at, len(self._tokens) - 1)]
        return Place(file=self._file, line=self._line + (token.line - 1 if token else 0))

    def fail(self, what: str, *, why: str, fix: str) -> NoReturn:
        """Tell what is wrong here."""
        raise PipelineError(f"{self.place()}: {what}", why=why, fix=fix)

    def _before(self) -> str:
        if self.is_done:
            return " at the end"
        token = self._tokens[self._at]
        return f" before {self.text[token.start : token.end + 1]!r}"
