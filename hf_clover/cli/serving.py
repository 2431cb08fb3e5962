"""`serve`: a target with its heads for programs that speak OpenAI's interface."""

from typing import Annotated, Any

import typer

from .inputs import at_hand, learning, load, remember_texts
from .options import Device, Dtype, GgufFile, Heads, Learn, NumAssistantTokens, Pack, Remember, Target, TrustRemoteCode


def serve(
    target: Target = None,
    gguf_file: GgufFile = None,
    heads: Heads = None,
    learn: Learn = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for every one of this machine.")] = (
        "localhost"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at.")] = 8000,
    num_assistant_tokens: NumAssistantTokens = None,
    remember: Remember = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    pack: Pack = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HF_CLOVER_API_KEY",
            help="Ask for this key on every route but /health. The variable, unlike the option, shows in no list of "
            "processes.",
            show_default=False,
        ),
    ] = None,
    allow_chat_templates: Annotated[
        bool,
        typer.Option("--allow-chat-templates", help="Render templates that clients send, which are programs."),
    ] = False,
    continuous_batching: Annotated[bool, typer.Option("--continuous-batching", hidden=True)] = False,
) -> None:
    """Serve a target over HTTP to programs that speak OpenAI's interface, with heads in every request.

    Chat and text completions and responses, streamed or not, one request after the other. Clients name the model as
    --target does, or as is said at the start. Needs the extra `serve`. docs/cli.md says what is refused, bounded and
    cancelled, and what belongs in front of a server in the open.

    Move to an engine with continuous batching, such as vLLM, once more requests wait on average than a forward gives
    tokens (`GET /speculation` counts them); examples/scaling/README.md says why, and docs/vllm.md how.

    Example: hf-clover serve --target Qwen/Qwen3-0.6B --heads qwen3-0.6b-clover-x --port 8000
    """
    if continuous_batching:
        raise ValueError(
            "`--continuous-batching` cannot go with heads: its paged cache takes one token a row and step, and no "
            "tree. Leave it out, or run `transformers serve --continuous-batching` without heads."
        )
    if target is not None and heads is None and learn is None:
        raise ValueError("`--heads` or `--learn` is missing: without heads, `transformers serve` serves the target.")
    from rich.console import Console

    from ..apps.lines import print_line
    from ..apps.serving import serve as run

    model, tokenizer, assistant = load(target, heads, dtype, device, trust_remote_code, gguf_file, pack, learn)
    if num_assistant_tokens is not None:
        model.generation_config.num_assistant_tokens = num_assistant_tokens  # the heads' is saved with what they learn
    if api_key is None and host not in ("localhost", "127.0.0.1", "::1"):
        said = f"Listening at {host} without a key: whoever reaches it is answered. See `--api-key`."
        print_line(Console(stderr=True), said, "yellow")
    name = target or at_hand().name
    options: dict[str, Any] = {"api_key": api_key, "allow_chat_templates": allow_chat_templates}
    with learning(learn, assistant, model, only_when_idle=True) as (assistant, _):
        remember_texts(assistant, remember)
        run(model, tokenizer, assistant, name, host, port, **options)
