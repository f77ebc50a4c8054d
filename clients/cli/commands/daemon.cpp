/// The commands about the daemon and its fleet file: up, down, validate.

#include <cerrno>
#include <cstdio>

#include <fmt/format.h>

#include "clients/cli/commands/command.h"
#include "clients/cli/commands/follow.h"
#include "clients/cli/commands/start_daemon.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"
#include "config/fleet_json.h"
#include "config/reader.h"
#include "ipc/base/pidfd.h"

namespace bulkhead::cli {
namespace {

void tell_warnings(const config::ReadFleet& read) {
    std::fputs(render_diagnostics(read.warnings, Style::of(stderr), "warning:", Colour::yellow).c_str(), stderr);
}

int validate(const Session& session, const std::filesystem::path& file) {
    const config::ReadFleet read = config::read_fleet(file);
    const int status = read.ok() ? exit_done : exit_config_invalid;
    if (session.json) {
        const json::object all{{"errors", config::to_json(read.diagnostics)},
                               {"warnings", config::to_json(read.warnings)}};
        print_json(all);
        return status;
    }
    tell_warnings(read);
    if (!read.ok()) {
        std::fputs(render_diagnostics(read.diagnostics, Style::of(stderr)).c_str(), stderr);
        return status;
    }
    std::string names;
    for (const config::ModelSpec& model : read.fleet.models) names += (names.empty() ? "" : ", ") + model.name;
    return print(fmt::format("{} is valid: {}\n", one_line(file.string()), names));
}

/// The first of a file's errors; --json prints it for all of them.
Error first_error(const config::ReadFleet& read) {
    const config::Diagnostic& first = read.diagnostics.front();
    Error error = first.error;
    error.attempt = fmt::format("{}:{}:{}: {}", first.file.string(), first.line, first.column, first.error.attempt);
    if (read.diagnostics.size() > 1)
        error.attempt += fmt::format(" (and {} more: see `bulkhead validate`)", read.diagnostics.size() - 1);
    return error;
}

int up(const Session& session, const std::filesystem::path& fleet) {
    const config::ReadFleet read = config::read_fleet(fleet);
    if (!read.ok()) {
        if (session.json) throw ErrorException{first_error(read)};
        std::fputs(render_diagnostics(read.diagnostics, Style::of(stderr)).c_str(), stderr);
        return exit_config_invalid;
    }
    tell_warnings(read);
    const std::filesystem::path socket = std::filesystem::absolute(find_socket(session.socket)).lexically_normal();
    if (Result<ControlClient> running = ControlClient::connect(socket); running) {
        const auto info = running->call("daemon.info", {}, limits::answer);
        const std::string who = info ? " (pid " + text_member(info->result, "keeper_pid") + ", fleet " +
                                           text_member(info->result, "fleet") + ")"
                                     : "";
        throw ErrorException{{ErrorCode::already_running,
                              fmt::format("starting a daemon on {}: one answers there{}", socket.string(), who),
                              "use that one, or end it first with `bulkhead down`"}};
    }
    const json::value info = start_daemon(program_folder() / "bulkheadd", read.fleet.source, socket).value();
    return session.json ? print_json(info) : print(render_info(info, Style::of(stdout)));
}

int down(const Session& session) {
    ControlClient control = session.connect();
    const Answer info = control.call("daemon.info", {}, limits::answer).value();
    const std::int64_t keeper = integer_member(info.result, "keeper_pid").value_or(0);
    const UniqueFd pidfd = pidfd_of(static_cast<pid_t>(keeper));
    if (!pidfd && errno != ESRCH)
        throw ErrorException{system_error(fmt::format("watching the keeper, pid {}", keeper), errno)};

    report_new_supervisors(session, control);
    const Answer stopped = control.call("daemon.stop").value();
    if (session.json)
        print_json(stopped.result);
    else if (bool_member(stopped.result, "receipts_lost"))
        print("all is stopped; the supervisor ended before it could tell the receipts\n");
    else
        print(render_receipts(array_member(stopped.result, "receipts"), Style::of(stdout)));
    if (pidfd && !ends_within(pidfd, limits::keeper_end))
        throw ErrorException{
            {ErrorCode::deadline_exceeded,
             fmt::format("stopping the daemon: all is unloaded, but its keeper, pid {}, still runs after {} s", keeper,
                         limits::keeper_end.count() / 1000),
             "see logs/ beside the control socket"}};
    return exit_done;
}

}  // namespace

void add_up(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("up", "Start the daemon with a fleet of models, detached");
    const auto fleet = std::make_shared<std::string>();
    command->add_option("FLEET", *fleet, "The fleet file (YAML)")->required();
    command->footer(
        "Checks the file first, as `validate` does; starts bulkheadd, which lies beside this program, and\n"
        "returns when it answers. Models with `preload: true` then load by themselves, others at their first\n"
        "use. What the daemon prints is in logs/ beside the control socket. With --json: what `info --json`\n"
        "prints.\n"
        "\nExamples:\n  bulkhead up config/fleets/demo.yaml\n"
        "  bulkhead --socket /tmp/b/control.sock up fleet.yaml\n"
        "\nExit status: 0 it answers, 1 it does not or one runs already, 78 the fleet file is invalid.");
    when_chosen(command, session, [&session, fleet] { return up(session, *fleet); });
}

void add_down(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("down", "Unload every model and stop the daemon");
    command->footer(
        "Returns when the daemon's last process is gone. Prints a receipt per worker, as `unload` does.\n"
        "With --json: {\"receipts\":[…]}; \"receipts_lost\" is true where the supervisor died before it told\n"
        "them.\n"
        "\nExit status: 0 nothing runs, 1 failed, 3 no daemon answers.");
    when_chosen(command, session, [&session] { return down(session); });
}

void add_validate(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("validate", "Check a fleet file; needs no daemon");
    const auto file = std::make_shared<std::string>();
    command->add_option("FILE", *file, "The fleet file (YAML)")->required();
    command->footer(
        "All errors of the file at once, each with line, column and remedy. Model files must exist; what is\n"
        "in them is checked when they are loaded. The keys are described in docs/configuration.md; editors\n"
        "use config/fleet.schema.json.\n"
        "With --json: {\"errors\":[{\"file\",\"line\",\"column\",\"code\",\"attempt\",\"remedy\"}],\"warnings\":[…]};\n"
        "errors is empty when the file is valid, warnings tells what has no effect; line is 0 when the file\n"
        "cannot be read at all.\n"
        "\nExample:\n  bulkhead validate config/fleets/gpu.yaml\n\nExit status: 0 valid, 78 invalid.");
    when_chosen(command, session, [&session, file] { return validate(session, *file); });
}

}  // namespace bulkhead::cli
