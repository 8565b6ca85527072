"""The names in Python source that is not run."""

from __future__ import annotations

import symtable


def global_names(source: str) -> set[str]:
    """Return the names that a source reads from its module."""
    return {each.get_name() for table, each in _symbols(source) if each.is_referenced() and _is_of_module(table, each)}


def bound_names(source: str) -> set[str]:
    """Return the names that a source binds in its module."""
    return {
        each.get_name()
        for table, each in _symbols(source)
        if (each.is_assigned() or each.is_imported()) and _is_of_module(table, each)
    }


def _symbols(source: str) -> list[tuple[symtable.SymbolTable, symtable.Symbol]]:
    tables = [symtable.symtable(source, "<source>", "exec")]
    for table in tables:
        tables += table.get_children()
    return [(table, each) for table in tables for each in table.get_symbols()]


def _is_of_module(table: symtable.SymbolTable, symbol: symtable.Symbol) -> bool:
    return symbol.is_global() or table.get_type() == "module"
