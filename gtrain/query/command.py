"""``gtrain score run=FOLDER QUESTION...`` and ``gtrain neighbors run=FOLDER NAME...``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from gtrain.errors import ConfigError
from gtrain.messages import did_you_mean
from gtrain.query.model import Answer, TrainedModel
from gtrain.query.options import NeighborOptions, Options, ScoreOptions
from gtrain.query.questions import Question

FORMATS = ("tsv", "json")
STDIN = "-"


def score(arguments: Sequence[str]) -> None:
    """Run ``gtrain score``.

    Args:
        arguments: ``run=FOLDER``, further :class:`ScoreOptions`, and questions.

    Raises:
        GtrainError: an argument or a name is wrong.
    """
    options, texts = take_options(arguments, ScoreOptions, "score")
    questions = [Question.parse(text) for text in _all_texts(options, texts, "score 'HEAD,RELATION,?'")]
    model = _open(options)
    answers = model.ask_many(questions, k=options.k, filtered=options.filtered)
    for question, answer in zip(questions, answers, strict=True):
        _print_score(question, answer, options.format)


def neighbors(arguments: Sequence[str]) -> None:
    """Run ``gtrain neighbors``.

    Args:
        arguments: ``run=FOLDER``, further :class:`NeighborOptions`, and names of entities.

    Raises:
        GtrainError: an argument or a name is wrong.
    """
    options, texts = take_options(arguments, NeighborOptions, "neighbors")
    names = _all_texts(options, texts, "neighbors NAME")
    model, index = _open(options), None
    kinds = [options.type or model.type_of([name]) for name in names]
    if options.index is not None:
        if len(set(kinds)) > 1:
            raise ConfigError(
                f"index={options.index} was set, and the names are of the types {', '.join(dict.fromkeys(kinds))}.",
                hint="ask for names of one type, with a file for each type.",
            )
        path = Path(options.index)
        if path.exists():
            index = model.load_index(path, entity_type=kinds[0])
        else:
            print(f"building {path}", file=sys.stderr)
            index = model.build_index(path, entity_type=kinds[0], metric=options.metric)
    for kind in dict.fromkeys(kinds):
        mine = [name for name, of in zip(names, kinds, strict=True) if of == kind]
        nearest = model.neighbors(mine, k=options.k, entity_type=kind, metric=options.metric, index=index)
        for name, answers in zip(mine, nearest, strict=True):
            _print_answers([name], answers, options.format, {"name": name})


def take_options(arguments: Sequence[str], kind: type[Any], verb: str) -> tuple[Any, list[str]]:
    """Return the options among arguments, and the other arguments.

    ``KEY=VALUE`` is an option if KEY is one: names may contain ``=``.

    Raises:
        ConfigError: a value is wrong, or ``run`` is missing.
    """
    known, values, texts = {field.name: field for field in fields(kind)}, {}, []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key not in known and (meant := did_you_mean(key, known)) is not None:
            raise ConfigError(
                f"{argument} was given; gtrain {verb} has no key {key}.",
                hint=f"{meant} Names are also read by input=FILE.",
            )
        if not equals or key not in known:
            texts.append(argument)
            continue
        values[key] = _value(key, value, known[key].default)
    if not values.get("run"):
        raise ConfigError(f"gtrain {verb} was given without a run.", hint=f"gtrain {verb} run=FOLDER, or run=last.")
    options = kind(**values)
    if options.format not in FORMATS:
        raise ConfigError(f"format={options.format} was set.", hint=f"the forms are {', '.join(FORMATS)}.")
    return options, texts


def _value(key: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ConfigError(f"{key}={text} was set.", hint="set true or false.")
        return text == "true"
    if isinstance(default, int):
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{key}={text} was set.", hint="set a number of 1 or more.")
        return int(text)
    return None if text == "null" else text


def _all_texts(options: Options, texts: list[str], form: str) -> list[str]:
    """Return the questions or names of the command line and of ``input``."""
    if options.input is not None:
        try:
            text = sys.stdin.read() if options.input == STDIN else Path(options.input).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(
                f"input={options.input} was set; it cannot be read: {reason}.", hint="name a text file in UTF-8, or -."
            ) from error
        texts = [*texts, *filter(None, text.split("\n"))]
    if not texts:
        raise ConfigError(f"gtrain {form.split()[0]} was given without a question.", hint=f"gtrain {form} run=FOLDER")
    return texts


def _open(options: Options) -> TrainedModel:
    return TrainedModel.open(options.run, ckpt_path=options.ckpt_path, store=options.store)


def _print_score(question: Question, answer: list[Answer] | tuple[float, float], form: str) -> None:
    relation = [] if question.relation is None else [question.relation]
    asked = {"head": question.head, "relation": question.relation, "tail": question.tail}
    if isinstance(answer, list):
        before = [question.head, *relation] if question.head is not None else [*relation, question.tail]
        _print_answers([str(name) for name in before], answer, form, asked, before_name=question.head is not None)
    elif form == "json":
        print(json.dumps({**asked, "tail_score": answer[0], "head_score": answer[1]}, ensure_ascii=False))
    else:
        print("\t".join([str(question.head), *relation, str(question.tail), *(f"{value:.9g}" for value in answer)]))


def _print_answers(
    words: list[str], answers: list[Answer], form: str, asked: Mapping[str, str | None], *, before_name: bool = True
) -> None:
    """Print the answers to one question: an object, or a line for each."""
    if form == "json":
        print(json.dumps({**asked, "answers": [asdict(answer) for answer in answers]}, ensure_ascii=False))
        return
    for answer in answers:
        edge = [*words, answer.name] if before_name else [answer.name, *words]
        print("\t".join([*edge, f"{answer.score:.9g}"]))
