#include <algorithm>
#include <csignal>
#include <cstdio>

#include "clients/cli/commands/command.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/render.h"
#include "clients/cli/text/terminal.h"

namespace bulkhead::cli {
namespace {

constexpr const char* purpose =
    "Bulkhead keeps every model in a process of its own and unloads it by ending that process.\n"
    "\n"
    "  bulkhead up fleet.yaml        start the daemon with a fleet of models\n"
    "  bulkhead load minilm          load a model; `infer` loads one by itself, too\n"
    "  bulkhead ps                   see what runs, where, and what it uses\n"
    "  bulkhead unload --all         end the processes; receipts tell what came back\n"
    "  bulkhead down                 unload all and stop the daemon\n";

constexpr const char* exits =
    "The daemon is found by --socket, $BULKHEAD_SOCKET, $XDG_RUNTIME_DIR/bulkhead/control.sock, then\n"
    "/run/bulkhead/control.sock. --socket and --json may stand before or after the command.\n"
    "\n"
    "With --json standard output is exactly one JSON document (`generate`, `logs -f` and `events`: one a\n"
    "line), and an error is one {\"error\":{\"code\",\"attempt\",\"remedy\"}} on standard error. Colours: only\n"
    "on a terminal, never with NO_COLOR set.\n"
    "\n"
    "A supervisor that dies is restarted, and its workers run on. Commands that wait go on with the next\n"
    "one; those that follow say on standard error that something may be missing.\n"
    "\n"
    "Exit status: 0 done, 1 the operation failed, 2 wrong usage, 3 no daemon answers, 78 the configuration\n"
    "is invalid.\n"
    "`bulkhead COMMAND --help` tells more.\n";

int tell(const Error& error, bool json) {
    std::fputs(render_error(error, json, Style::of(stderr)).c_str(), stderr);
    return exit_status(error.code);
}

/// Whether --json is given, even on a command line that could not be parsed.
bool asks_for_json(int argc, const char* const* argv) {
    return std::any_of(argv, argv + argc, [](std::string_view word) { return word == "--json"; });
}

}  // namespace

boost::json::value Session::ask(std::string_view method, boost::json::object params) const {
    return connect().call(method, std::move(params), limits::answer).value().result;
}

void when_chosen(CLI::App* command, Session& session, std::function<int()> run) {
    command->callback([&session, run = std::move(run)] { session.command = run; });
}

std::shared_ptr<std::string> add_name(CLI::App* command, const std::string& description) {
    auto name = std::make_shared<std::string>();
    command->add_option("NAME", *name, description)->required();
    return name;
}

int exit_status(ErrorCode code) noexcept {
    if (code == ErrorCode::not_running) return exit_no_daemon;
    if (code == ErrorCode::config_invalid) return exit_config_invalid;
    return exit_failed;
}

std::optional<int> parse(int argc, const char* const* argv, Session& session) {
    CLI::App app{purpose, "bulkhead"};
    app.footer(exits);
    app.set_version_flag("--version", "bulkhead " BULKHEAD_VERSION);
    app.add_option("--socket", session.socket, "The daemon's control socket")->type_name("PATH");
    app.add_flag("--json", session.json, "One JSON document instead of text");
    app.require_subcommand(1);
    app.fallthrough();  // commands inherit it: global options may follow them

    for (AddCommand* add : {add_up,      add_down,     add_ps,   add_top,    add_load,    add_unload,   add_restart,
                            add_infer,   add_generate, add_logs, add_events, add_why,     add_plan,     add_pin,
                            add_crashes, add_gpus,     add_info, add_reload, add_upgrade, add_validate, add_doctor})
        add(app, session);  // in the order of the help

    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& wrong) {
        if (wrong.get_exit_code() == 0) return app.exit(wrong);  // --help and --version
        tell({ErrorCode::input_invalid, std::string{"reading the command line: "} + wrong.what(),
              "see `bulkhead --help`, or `bulkhead COMMAND --help`"},
             asks_for_json(argc, argv));
        return exit_usage;
    }
    return std::nullopt;
}

int run(int argc, const char* const* argv) {
    std::signal(SIGPIPE, SIG_DFL);  // `bulkhead logs -f x | head` ends like any other filter
    Session session;
    if (const auto ended = parse(argc, argv, session)) return *ended;
    try {
        return session.command();
    } catch (const ErrorException& failure) {
        return tell(failure.error(), session.json);
    }
}

}  // namespace bulkhead::cli
