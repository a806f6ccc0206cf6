"""`shardcompute backup` and `restore`: what makes a cluster this cluster, as one private file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardcompute.cli.console import open_screen
from shardcompute.cli.options.cluster import ClusterFolder, StoreOption, cluster_folder
from shardcompute.core.settings import load_settings

if TYPE_CHECKING:
    from shardcompute.node.coordinator.journal import JournalStore
    from shardcompute.node.coordinator.shared import EtcdClient

BackupFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="The backup. Keep it safe: whoever has it is the cluster.")
]


def backup(file: BackupFile, *, data_dir: ClusterFolder = None, store: StoreOption = None) -> None:
    """Write a cluster's authority and journal, with its keys, tokens and who was thrown out, into a new file.

    The cluster may run meanwhile. Files of models and the history of requests are not in it.
    """
    from shardcompute.node.process.backup import open_file_journal, write_backup

    folder = cluster_folder(load_settings(), data_dir)
    with contextlib.ExitStack() as stack:
        journal: JournalStore
        if store is None:
            journal = stack.enter_context(contextlib.closing(open_file_journal(folder)))
        else:
            from shardcompute.node.process.candidacy import read_shared

            journal = read_shared(folder, stack.enter_context(_opened(store)))
        contents = write_backup(file.absolute(), folder, journal)
    open_screen().say(f"{file}: {contents}. Keep it safe: whoever has it is the cluster.")


def restore(
    file: BackupFile,
    *,
    data_dir: ClusterFolder = None,
    store: StoreOption = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Put a journal that is there aside, and the backup's in its place."),
    ] = False,
) -> None:
    """Make a cluster from a backup, or give another of its coordinators what it needs.

    A journal of this cluster that is there already stays as it is, unless it is to be replaced. The cluster must not
    run. Machines keep their certificates and come back by themselves; who was thrown out stays out.
    """
    from shardcompute.node.process.backup import read_backup, restore_to_folder
    from shardcompute.node.process.pidfile import CLUSTER_FILE, check_free

    folder = cluster_folder(load_settings(), data_dir)
    found = read_backup(file)
    check_free(folder / CLUSTER_FILE)
    if store is None:
        restored = restore_to_folder(found, folder, replaces=replace)
    else:
        from shardcompute.node.process.candidacy import restore_shared

        with _opened(store) as client:
            restored = restore_shared(found, folder, client, replaces=replace)
    screen = open_screen()
    if restored.has_journal:
        screen.say(f"the cluster {restored.name} is in {folder}: {restored.contents}")
    else:
        screen.say(
            f"the authority of {restored.name} is in {folder}; the journal that is there already stays as it is"
        )


@contextlib.contextmanager
def _opened(url: str) -> Iterator[EtcdClient]:
    from shardcompute.node.coordinator.shared import EtcdClient
    from shardcompute.node.coordinator.shared.etcd import EtcdAddress

    with contextlib.closing(EtcdClient(EtcdAddress.parse(url))) as client:
        yield client
