/// The commands that replace what runs without ending the workers: upgrade, reload.

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "clients/cli/commands/command.h"
#include "clients/cli/commands/follow.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"
#include "config/fleet_json.h"

namespace bulkhead::cli {
namespace {

using Clock = std::chrono::steady_clock;

json::value ask_within_renewal(ControlClient& control, std::string_view method) {
    return control.call(method, {}, limits::renewal).value().result;
}

json::array workers(ControlClient& control) {
    return array_member(ask_within_renewal(control, "fleet.status"), "models");
}

/// Waits until something changes, the connection ends, or `until` passes. True only for the last.
bool is_over(ControlClient& control, Clock::time_point until) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    const Result<> told = control.wait_notification(std::max(left, std::chrono::milliseconds{1}));
    if (told || told.error().code == ErrorCode::not_running) return false;
    if (told.error().code != ErrorCode::deadline_exceeded) throw ErrorException{told.error()};
    return true;
}

/// Waits until a supervisor with another pid answers. Returns its `daemon.info`.
json::value successor(ControlClient& control, std::int64_t before) {
    const Clock::time_point until = Clock::now() + limits::renewal;
    for (;;) {
        json::value info = ask_within_renewal(control, "daemon.info");
        if (integer_member(info, "supervisor_pid") != before) return info;
        // The old one still answers. Its end closes this connection.
        if (is_over(control, until))
            throw ErrorException{
                {ErrorCode::deadline_exceeded,
                 fmt::format("waiting for the new supervisor: the old one, pid {}, still runs", before),
                 "see logs/ beside the control socket"}};
    }
}

/// Waits until no worker is being adopted. Returns the fleet's rows.
json::array adopted(ControlClient& control) {
    const Clock::time_point until = Clock::now() + limits::adoption;
    control.on_reconnect([&control] { static_cast<void>(control.call("events.subscribe", {}, limits::answer)); });
    (void)ask_within_renewal(control, "events.subscribe");
    for (;;) {
        json::array rows = workers(control);
        const auto waits =
            std::ranges::find(rows, "adopting", [](const auto& row) { return text_member(row, "state"); });
        if (waits == rows.end()) return rows;
        if (is_over(control, until))
            throw ErrorException{{ErrorCode::deadline_exceeded,
                                  fmt::format("waiting for {} to be adopted", worker_name(*waits)),
                                  "see `bulkhead ps` and `bulkhead why`"}};
    }
}

/// What the upgrade did to a worker that ran before it.
enum class Outcome { kept, lost, ended };

/// Without a process, a worker was unloaded on request, unless its state says that it crashed.
Outcome outcome_of(const json::value& worker, const json::array& now) {
    const auto row = std::ranges::find(now, worker_name(worker), worker_name);
    if (row == now.end()) return Outcome::ended;
    const auto pid = integer_member(*row, "pid");
    if (pid && pid == integer_member(worker, "pid")) return Outcome::kept;
    const std::string state = text_member(*row, "state");
    return pid || state == "backoff" || state == "quarantined" ? Outcome::lost : Outcome::ended;
}

/// Why the keeper is still the old program although it should have re-executed; nothing if it is
/// not, or is too old to tell.
std::optional<Error> keeper_left_behind(const json::value& before, const json::value& now) {
    const auto executions = integer_member(now, "keeper_executions");
    if (!executions || *executions != integer_member(before, "keeper_executions").value_or(0)) return std::nullopt;
    const std::string why = one_line(text_member(now, "keeper_upgrade_failed"));
    return Error{
        ErrorCode::load_failed,
        fmt::format("upgrading the keeper, pid {}: it was not re-executed, and the old program goes on{}{}",
                    text_member(now, "keeper_pid"), why.empty() ? "" : ": ", why),
        "what bulkheadd printed says more (logs/bulkheadd.out beside the control socket, or the journal); repair "
        "the installed bulkheadd and upgrade again. The supervisor is the new one, and every worker runs on"};
}

int upgrade(const Session& session, bool supervisor_only) {
    ControlClient control = session.connect();
    const json::value before = ask_within_renewal(control, "daemon.info");
    const json::array ran = workers(control);
    const std::int64_t supervisor = integer_member(before, "supervisor_pid").value_or(0);

    // If the answer was lost, the next supervisor's pid tells whether the upgrade was done.
    const Result<Answer> asked = control.call("daemon.upgrade", {{"keeper", !supervisor_only}}, limits::renewal);
    if (!asked && asked.error().code != ErrorCode::not_running) throw ErrorException{asked.error()};
    const json::value info = successor(control, supervisor);
    const json::array run = adopted(control);

    json::array kept;
    std::map<Outcome, std::string> names;
    for (const json::value& worker : ran) {
        const auto pid = integer_member(worker, "pid");
        if (!pid) continue;
        const std::string name = fmt::format("{}, pid {}", worker_name(worker), *pid);
        const Outcome outcome = outcome_of(worker, run);
        std::string& list = names[outcome];
        list += (list.empty() ? "" : "; ") + name;
        kept.push_back({{"model", text_member(worker, "model")},
                        {"replica", integer_member(worker, "replica").value_or(0)},
                        {"pid", *pid},
                        {"kept", outcome == Outcome::kept}});
    }
    const auto keeper_failed = supervisor_only ? std::nullopt : keeper_left_behind(before, info);
    const std::string& lost = names[Outcome::lost];
    const std::string& ended = names[Outcome::ended];
    const std::string& runs_on = names[Outcome::kept];
    if (session.json) {
        print_json({{"old_supervisor_pid", supervisor},
                    {"supervisor_pid", integer_member(info, "supervisor_pid").value_or(0)},
                    {"keeper_pid", integer_member(info, "keeper_pid").value_or(0)},
                    {"old_version", text_member(before, "version")},
                    {"version", text_member(info, "version")},
                    {"workers", kept}});
    } else {
        std::string text = fmt::format("supervisor  pid {} -> {}, version {} -> {}\n", supervisor,
                                       text_member(info, "supervisor_pid"), one_line(text_member(before, "version")),
                                       one_line(text_member(info, "version")));
        text += fmt::format("keeper      pid {}, {}\n", text_member(info, "keeper_pid"),
                            supervisor_only ? "left as it is"
                            : keeper_failed ? "not re-executed: the old program goes on"
                                            : "the same process, re-executed");
        text += kept.empty() ? std::string{"workers     none ran\n"}
                             : fmt::format("workers     {}\n", runs_on.empty() ? "none runs on" : runs_on + ": run on");
        if (!ended.empty()) text += fmt::format("            {}: ended meanwhile, on request\n", ended);
        print(text);
    }
    if (keeper_failed) throw ErrorException{*keeper_failed};
    if (lost.empty()) return exit_done;
    throw ErrorException{{ErrorCode::worker_lost, fmt::format("upgrading: a process was not taken over: {}", lost),
                          "`bulkhead why` and `bulkhead logs` of that model tell the reason"}};
}

/// The errors of an invalid file, converted from the daemon's answer, which spells them as
/// `validate --json` does.
std::vector<config::Diagnostic> diagnostics_from(const json::object& data) {
    std::vector<config::Diagnostic> all;
    const json::value whole(data);
    for (const json::value& error : array_member(whole, "errors"))
        all.push_back({text_member(error, "file"),
                       static_cast<int>(integer_member(error, "line").value_or(0)),
                       static_cast<int>(integer_member(error, "column").value_or(0)),
                       {error_code_from(text_member(error, "code")).value_or(ErrorCode::config_invalid),
                        text_member(error, "attempt"), text_member(error, "remedy")}});
    return all;
}

int reload(const Session& session) {
    ControlClient control = session.connect();
    report_new_supervisors(session, control);
    const Result<Answer> answer = control.call("fleet.reload");
    if (!answer) {
        const auto diagnostics = diagnostics_from(control.error_data());
        if (answer.error().code != ErrorCode::config_invalid || diagnostics.empty())
            throw ErrorException{answer.error()};
        if (session.json) {
            print_json({{"errors", config::to_json(diagnostics)}});
        } else {
            std::fputs(render_diagnostics(diagnostics, Style::of(stderr)).c_str(), stderr);
            std::fputs("The fleet runs on as it was.\n", stderr);
        }
        return exit_config_invalid;
    }
    if (session.json) return print_json(answer->result);
    std::string text;
    for (const char* kind : {"added", "removed", "changed", "unchanged"}) {
        std::string names;
        for (const json::value& name : array_member(answer->result, kind))
            names += (names.empty() ? "" : ", ") + one_line(name.is_string() ? name.get_string().c_str() : "");
        text += fmt::format("{:<10} {}\n", kind, names.empty() ? "none" : names);
    }
    return print(text);
}

}  // namespace

void add_upgrade(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("upgrade", "Replace the running programs by the installed ones");
    const auto supervisor_only = std::make_shared<bool>(false);
    command->add_flag("--supervisor-only", *supervisor_only, "Leave the keeper as it is");
    command->footer(
        "The keeper re-executes its program, as the same process, and starts a new supervisor, which takes\n"
        "over all workers: they run on, with their graphs, and clients stream on meanwhile. A worker itself\n"
        "keeps the program it was started with until `restart`. Returns when the new supervisor answers and\n"
        "has heard from every worker.\n"
        "With --json: {\"old_supervisor_pid\",\"supervisor_pid\",\"keeper_pid\",\"old_version\",\"version\",\n"
        "\"workers\":[{\"model\",\"replica\",\"pid\",\"kept\"}]}.\n"
        "\nExamples:\n  bulkhead upgrade\n  bulkhead upgrade --supervisor-only\n"
        "The installed supervisor must first show that it starts and reads the fleet; else nothing is\n"
        "replaced.\n"
        "\nExit status: 0 done, and every worker that was not unloaded runs, with the same pid; 1 one does not,\n"
        "or the keeper could not be re-executed, or it failed; 3 no daemon answers.");
    when_chosen(command, session, [&session, supervisor_only] { return upgrade(session, *supervisor_only); });
}

void add_reload(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("reload", "Read the fleet file again and apply what changed");
    command->footer(
        "Removed models are unloaded, changed ones that are loaded are drained and started again, unchanged\n"
        "ones are left alone. An invalid file changes nothing, and is refused as `validate` does, with all\n"
        "its errors at once.\n"
        "With --json: {\"added\",\"removed\",\"changed\",\"unchanged\"}, names in each; of an invalid file\n"
        "{\"errors\":[{\"file\",\"line\",\"column\",\"code\",\"attempt\",\"remedy\"}]}.\n"
        "\nExample:\n  bulkhead reload\n"
        "\nExit status: 0 applied, 1 failed, 3 no daemon answers, 78 the fleet file is invalid.");
    when_chosen(command, session, [&session] { return reload(session); });
}

}  // namespace bulkhead::cli
