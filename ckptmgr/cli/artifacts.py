"""`artifact push | pull | ls | show | tag | untag`: named, versioned directories beside the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptmgr.cli.artifact_output import artifact_json, emit_store, emit_versions, metrics_text, row_json
from ckptmgr.cli.command import Command, Group, local_directory
from ckptmgr.cli.looking import Json
from ckptmgr.cli.manifest_output import emit_manifest, producer_text, size_text
from ckptmgr.cli.moving import Bar, FollowLinks, metric_of, warn_of_repair
from ckptmgr.cli.output import count, emit, emit_json, say, size, warn, when

Name = Annotated[str, typer.Argument(metavar="STORE/NAME", help="The artifact.")]
Reference = Annotated[
    str, typer.Argument(metavar="STORE/NAME[@WHICH]", help="WHICH: a version (3 or v3), a tag, or latest, the default.")
]

_EPILOG = """\b
Examples:
  ckptmgr artifact push ./out/final s3://bucket/exp/final-model --tag production \\
      --from s3://bucket/exp/run@best:eval_loss
  ckptmgr artifact ls s3://bucket/exp
  ckptmgr artifact pull s3://bucket/exp/final-model@production --to ./model

verify and prune take STORE/NAME as they take a run: versions are its steps."""
_PUSH_EPILOG = """\b
Examples:
  ckptmgr artifact push ./out/final s3://bucket/exp/final-model
  ckptmgr artifact push ./out/final s3://bucket/exp/final-model --tag production \\
      --from s3://bucket/exp/run@best:eval_loss --metric eval_loss=1.25
  ckptmgr artifact push ./report.html s3://bucket/exp/report --meta suite=mmlu

Exit codes: 0 committed, or the same bytes were there already; 2 wrong usage; 3 --from names nothing; 4 the store is unavailable or refuses:
repeat the push, which sends only what is missing; 5 a file changed meanwhile; 7 the version is taken, STORE/NAME is a run of
checkpoints, or another process is pushing the same."""
_PULL_EPILOG = """\b
Examples:
  ckptmgr artifact pull s3://bucket/exp/final-model --to ./model
  ckptmgr artifact pull s3://bucket/exp/final-model@production --to ./model
  ckptmgr artifact pull s3://bucket/exp/final-model@v3 --only weights --only '*.json'

Exit codes: 0 done, or DIR held it already; 3 no such artifact, version or tag, or nothing that --only means; 4 the store is unavailable or refuses, or the disk is full;
5 it is damaged; 7 DIR holds something else."""
_LS_EPILOG = """Exit codes: 0 done, also when something is shown as damaged; 3 there is neither an artifact nor a store that has some; 4 the
store could not be asked."""
_SHOW_EPILOG = (
    "Exit codes: 0 done; 3 no such artifact, version or tag; 4 the store could not be asked; 5 its manifest is damaged."
)
_TAG_EPILOG = "Exit codes: 0 done; 2 not a tag; 3 no such artifact or version; 4 the store is unavailable or refuses."
_UNTAG_EPILOG = "Exit codes: 0 done; 3 no such artifact or tag; 4 the store is unavailable or refuses."


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        cls=Group,
        help="Named, versioned directories: final models, tokenizers, reports.",
        short_help="Keep final models and reports, by name and version.",
        epilog=_EPILOG,
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    group.command("push", cls=Command, epilog=_PUSH_EPILOG, short_help="Commit a directory or file as a version.")(push)
    group.command("pull", cls=Command, epilog=_PULL_EPILOG, short_help="Fetch a version, verified.")(pull)
    group.command("ls", cls=Command, epilog=_LS_EPILOG, short_help="List versions, or a store's artifacts.")(ls)
    group.command("show", cls=Command, epilog=_SHOW_EPILOG, short_help="Show one version.")(show)
    group.command("tag", cls=Command, epilog=_TAG_EPILOG, short_help="Point a tag at a version.")(tag)
    group.command("untag", cls=Command, epilog=_UNTAG_EPILOG, short_help="Remove a tag.")(untag)
    app.add_typer(group, name="artifact")


# --- push and pull --------------------------------------------------------------------------------------------------------------


def push(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="The directory, or the one file; written and closed.")],
    url: Annotated[str, typer.Argument(metavar="STORE/NAME", help="The artifact; created if there is none.")],
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", help="Make this version; default: the next one.")
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="T", help="Also point this tag at it; several times if need be."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="RUN[@SELECTOR]", help="The checkpoint that it was made from; links the two."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="K=V", help="A metric, several times if need be.")
    ] = None,
    meta: Annotated[
        list[str] | None, typer.Option("--meta", metavar="K=V", help="Anything to keep with it, several times.")
    ] = None,
    follow_links: FollowLinks = False,
    as_json: Json = False,
) -> None:
    """Commit a directory, or one file, as the next version of an artifact, and print which, once it is in the store.

    Files that an earlier version holds unchanged are copied within the store. Nothing is ever overwritten.
    """
    from ckptmgr.run.artifact_push import push_artifact

    metrics = dict(metric_of(text) for text in metric or ())
    metadata = dict(_meta(text) for text in meta or ())
    with Bar() as bar:
        pushed = push_artifact(
            local_directory(path),
            url,
            version=version,
            tags=tags or (),
            source=source,
            metrics=metrics,
            metadata=metadata,
            follow_links=follow_links,
            described=lambda manifest: bar.started(manifest, "local"),
            moved=bar.moved,
        )
    warn_of_repair(pushed.repaired, pushed.url)
    if as_json:
        repaired = [one.file for one in pushed.repaired]
        emit_json({**artifact_json(pushed), "existed": pushed.existed, "repaired": repaired})
        return
    emit(pushed.reference)
    what = "was there already, with the same bytes" if pushed.existed else "committed"
    what += f", and {count(len(pushed.repaired), 'file')} of it sent again," if pushed.repaired else ""
    later = "" if pushed.is_latest else "; it is not the latest version"
    files = count(len(pushed.manifest.files), "file")
    say(f"v{pushed.version}, {files}, {size(pushed.manifest.size_bytes)}: {what} in {pushed.url}{later}")


def _meta(text: str) -> tuple[str, str]:
    from ckptmgr.core.errors import ConfigError

    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--meta {text!r} is not NAME=VALUE", hint="give for instance --meta dataset=v2")
    return name, value


def pull(
    reference: Reference,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="The directory. Default: ./NAME-v<version>.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="ROLE|GLOB", help="Only these files: weights, config, tokenizer, or a pattern."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace whatever else DIR holds.")] = False,
    as_json: Json = False,
) -> None:
    """Put a version of an artifact, or some of its files, on local disk, verified, and print where."""
    from ckptmgr.run.artifacts import pull_artifact

    target = None if to is None else local_directory(to)
    with Bar() as bar:
        pulled = pull_artifact(reference, target, only=only or (), overwrite=replace, progress=bar)
    artifact, files = pulled.artifact, pulled.files
    is_part = len(files) < len(artifact.manifest.files)
    if as_json:
        told = {"path": str(pulled.path), "fetched_bytes": pulled.fetched_bytes, "partial": is_part}
        emit_json({**told, "pulled": [entry.path for entry in files], **artifact_json(artifact)})
        return
    emit(str(pulled.path))
    every = count(len(artifact.manifest.files), "file")
    share = f"{len(files)} of {every}" if is_part else every
    origin = f"{size(pulled.fetched_bytes)} of it from {artifact.url}" if pulled.fetched_bytes else "already there"
    say(f"v{artifact.version}: {share}, {size(sum(entry.size for entry in files))} verified, {origin}")


# --- looking ----------------------------------------------------------------------------------------------------------------------


def ls(
    url: Annotated[str, typer.Argument(metavar="STORE[/NAME]", help="An artifact, or a store.")],
    check: Annotated[
        bool, typer.Option("--check", help="Ask the store whether each version is whole; downloads nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the versions of an artifact, lowest first, or the artifacts of a store."""
    from ckptmgr.core.artifacts import KIND
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.run.artifacts import open_artifact
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.overview import run_overview, store_overview

    if RunDirectory.find(url) is None:
        if "@" in url.rstrip("/").rpartition("/")[2]:
            raise ConfigError(f"{url!r} names one version", hint="see it with `ckptmgr artifact show`")
        store, runs = store_overview(url, kind=KIND)
        emit_store(store, runs, as_json=as_json)
        return
    overview = run_overview(open_artifact(url), all_lineages=True, check=check)
    if as_json:
        emit_json(
            {
                "artifact": overview.run.url,
                "name": overview.run.name,
                "versions": [row_json(overview, row) for row in overview.rows],
            }
        )
    else:
        emit_versions(overview)
    for row in overview.rows:
        if row.why:
            warn(f"{row.id} is damaged: {row.why}")


def show(reference: Reference, as_json: Json = False) -> None:
    """Show one version: its files, and what it was made from. With --json, its manifest."""
    import json

    from ckptmgr.core.artifacts import resolve_location
    from ckptmgr.core.manifest import encode_manifest
    from ckptmgr.run.artifacts import show_artifact

    artifact = show_artifact(reference)
    manifest = artifact.manifest
    if as_json:
        emit_json(json.loads(encode_manifest(manifest)))
        return
    source = artifact.source
    where = source and source.location and resolve_location(source.location, artifact.url)
    facts = (
        ("artifact", artifact.reference),
        ("version", f"{artifact.version}{' (latest)' if artifact.is_latest else ''}"),
        ("id", manifest.id),
        ("pushed", f"{when(manifest.created_at)} UTC" if manifest.created_at else "unknown"),
        ("tags", ", ".join(artifact.tags)),
        ("from", "" if source is None else f"step {source.stem.step} ({source.stem}) of {where or source.run}"),
        ("metrics", metrics_text(manifest)),
        *(
            (f"meta {name}", value if isinstance(value, str) else json.dumps(value))
            for name, value in sorted(artifact.metadata.items())
        ),
        ("size", size_text(manifest)),
        ("made by", producer_text(manifest)),
    )
    emit_manifest(facts, manifest)


# --- tags -------------------------------------------------------------------------------------------------------------------------


def tag(
    url: Name,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="3 or v3, another tag, or latest.")],
    name: Annotated[str, typer.Argument(metavar="TAG", help="Letters, digits, '.', '_' and '-'; no version.")],
    as_json: Json = False,
) -> None:
    """Point a tag at a version, wherever it pointed before. A tagged version is never pruned."""
    from ckptmgr.run.artifacts import artifact_url, tag_artifact

    tagged = tag_artifact(f"{artifact_url(url)}@{version}", name)
    if as_json:
        emit_json({"artifact": tagged.url, "tag": name, "version": tagged.version, "id": tagged.manifest.id})
    else:
        say(f"{name} is v{tagged.version} of {tagged.url}")


def untag(
    url: Name,
    name: Annotated[str, typer.Argument(metavar="TAG", help="The tag to remove; its version stays.")],
    as_json: Json = False,
) -> None:
    """Remove a tag from an artifact; the version that it pointed to stays."""
    from ckptmgr.run.artifacts import artifact_url, untag_artifact

    stem = untag_artifact(url, name)
    if as_json:
        emit_json({"artifact": artifact_url(url), "tag": name, "version": stem.step, "id": str(stem)})
    else:
        say(f"{name} was v{stem.step} of {artifact_url(url)}, and is no tag any more")
