"""The command groups: verbs of plugins beside the core's, and one way in which every error leaves the process."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import ConfigError, PluginError, SurogateError
from .console import error_console

# Typer does not export the class that all its usage errors derive from.
_USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
# Typer ends a command through these; they are no failures.
_CONTROL = (typer.Exit, typer.Abort, _USAGE_ERROR, BrokenPipeError, EOFError)


class PluginGroup(TyperGroup):
    """A group whose verbs also come from plugins: those that they name as "GROUP.VERB", in the outermost group as "VERB"."""

    def _verbs(self) -> dict[str, object]:
        return plugin_verbs("" if isinstance(self, SurogateGroup) else f"{self.name}.")

    def list_commands(self, ctx: Any) -> list[str]:
        """The core's verbs in their order, then those of plugins."""
        return [*super().list_commands(ctx), *(name for name in self._verbs() if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb's command; plugins are loaded only where the core has no such verb."""
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in self._verbs():
            return own
        return command_of(cmd_name, self._verbs()[cmd_name])


class SurogateGroup(PluginGroup):
    """The outermost group, which turns errors into a message and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes `--debug` wherever it stands, not only before the verb."""
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            args = ["--debug", *(arg for arg in args[:end] if arg != "--debug"), *args[end:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb. What the user asked for and cannot have (`ConfigError`, `PluginError`) ends with 2, other errors
        with 1, Ctrl-C with 130."""
        debug = bool(ctx.params.get("debug"))
        try:
            return super().invoke(ctx)
        except _CONTROL:
            raise
        except KeyboardInterrupt:
            error_console().print("interrupted")
            raise typer.Exit(130) from None
        except SurogateError as error:
            self._report(error, debug)
            raise typer.Exit(2 if isinstance(error, (ConfigError, PluginError)) else 1) from None
        except Exception as error:
            self._report_unexpected(error, debug)
            raise typer.Exit(1) from None

    @staticmethod
    def _report(error: SurogateError, debug: bool) -> None:
        if debug:
            traceback.print_exc(file=sys.stderr)
        console = error_console()
        console.print("error:", style="bold red", end=" ")
        console.print(error.message)
        if error.hint:
            console.print(error.hint, style="cyan")

    @staticmethod
    def _report_unexpected(error: Exception, debug: bool) -> None:
        if debug:
            traceback.print_exc(file=sys.stderr)
            return
        console = error_console()
        console.print("error:", style="bold red", end=" ")
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            console.print(f"{error.filename}: {error.strerror}")  # the system says what is wrong, and with which file
            return
        console.print(f"{type(error).__name__}: {error}")
        console.print("This is not an error that Surogate expects. Run the command again with --debug.", style="cyan")


def plugin_verbs(group: str) -> dict[str, object]:
    """Verbs that plugins bring to a group ("": the outermost, "bench."): name -> function or `typer.Typer`. A plugin that does
    not load brings none."""
    from ..plugins.manager import get_manager

    found = {name.removeprefix(group): verb for name, verb in get_manager().cli_commands.items() if name.startswith(group)}
    return {name: verb for name, verb in found.items() if "." not in name}


def command_of(name: str, verb: Any) -> Any:
    """The command for a plugin's function or `typer.Typer`."""
    if isinstance(verb, typer.Typer):
        return typer.main.get_command(verb)
    wrapper = typer.Typer(add_completion=False)
    wrapper.command(name)(verb)
    return typer.main.get_command(wrapper)
