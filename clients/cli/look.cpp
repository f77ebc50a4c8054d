/// The commands that only look: ps, why, info, logs, events.

#include <poll.h>

#include <cstdio>

#include <fmt/format.h>

#include "clients/cli/command.h"
#include "clients/cli/json_access.h"
#include "clients/cli/limits.h"
#include "clients/cli/output.h"
#include "clients/cli/render.h"

namespace bulkhead::cli {
namespace {

/// A question that the daemon answers from memory.
Result<json::value> ask(ControlClient& control, std::string_view method, json::object params = {}) {
    Result<Answer> answer = control.call(method, std::move(params), limits::answer);
    if (!answer) return std::move(answer).error();
    return std::move(answer->result);
}

Result<int> show_workers(const Session& session) {
    Result<ControlClient> control = session.connect();
    if (!control) return control.error();
    const Result<json::value> status = ask(*control, "fleet.status");
    if (!status) return status.error();
    const json::array& rows = array_member(*status, "models");
    if (session.json) return print_json(rows);
    return print(render_workers(rows, Style::of(stdout)));
}

/// A new picture at every event, and once a second for the counters, until the daemon or the reader goes away.
Result<int> watch_workers(const Session& session) {
    Result<ControlClient> control = session.connect();
    if (!control) return control.error();
    if (const auto subscribed = ask(*control, "events.subscribe"); !subscribed) return subscribed.error();
    const bool redraw = is_terminal(stdout);
    const Style style = Style::of(stdout);
    for (;;) {
        const Result<json::value> status = ask(*control, "fleet.status");
        if (!status) return status.error();
        const std::string picture = render_workers(array_member(*status, "models"), style);
        if (const auto printed = print((redraw ? "\x1b[H\x1b[2J" : "") + picture + (redraw ? "" : "\n")); !printed)
            return printed.error();
        pollfd ready{control->fd(), POLLIN, 0};
        ::poll(&ready, 1, static_cast<int>(limits::watch.count()));  // what has come is read by the next call
    }
}

Result<int> show_why(const Session& session, const std::string& model) {
    Result<ControlClient> control = session.connect();
    if (!control) return control.error();
    const Result<json::value> why = ask(*control, "model.why", {{"model", model}});
    if (!why) return why.error();
    return session.json ? print_json(*why) : print(render_why(*why, Style::of(stdout)));
}

Result<int> show_info(const Session& session) {
    Result<ControlClient> control = session.connect();
    if (!control) return control.error();
    const Result<json::value> info = ask(*control, "daemon.info");
    if (!info) return info.error();
    return session.json ? print_json(*info) : print(render_info(*info, Style::of(stdout)));
}

struct Logs {
    std::string model;
    int lines = 100;
    bool follow = false;
};

Result<int> show_logs(const Session& session, const Logs& logs) {
    Result<ControlClient> control = session.connect();
    if (!control) return control.error();
    const Style style = Style::of(stdout);
    const auto print_line = [&](const json::value& line) {
        return session.json ? print_json(line) : print(render_log_line(line, style));
    };
    std::vector<json::object> arrived;  // lines may overtake the answer that holds the earlier ones
    control->on_notification([&](std::string_view method, const json::object& params) {
        if (method == "log") arrived.push_back(params);
    });
    const Result<json::value> tail =
        ask(*control, "logs.tail", {{"model", logs.model}, {"lines", logs.lines}, {"follow", logs.follow}});
    if (!tail) return tail.error();
    if (session.json && !logs.follow) return print_json(*tail);
    for (const json::value& line : array_member(*tail, "lines"))
        if (const auto printed = print_line(line); !printed) return printed.error();
    while (logs.follow) {
        for (const json::object& line : std::exchange(arrived, {}))
            if (const auto printed = print_line(line); !printed) return printed.error();
        if (const Result<> more = control->wait_notification(); !more) return more.error();
    }
    return exit_done;
}

struct Events {
    std::vector<std::string> models;
    std::int64_t count = 0;  ///< 0: until the daemon ends
};

Result<int> show_events(const Session& session, const Events& events) {
    Result<ControlClient> control = session.connect();
    if (!control) return control.error();
    std::vector<json::object> arrived;
    control->on_notification([&](std::string_view method, const json::object& params) {
        if (method == "event") arrived.push_back(params);
    });
    json::object params;
    if (!events.models.empty()) params["models"] = json::value_from(events.models);
    if (const auto subscribed = ask(*control, "events.subscribe", std::move(params)); !subscribed)
        return subscribed.error();
    const Style style = Style::of(stdout);
    std::int64_t shown = 0;
    for (;;) {
        for (const json::object& event : std::exchange(arrived, {})) {
            const auto printed = session.json ? print_json(event) : print(render_event(event, style));
            if (!printed) return printed.error();
            if (++shown == events.count) return exit_done;
        }
        if (const Result<> more = control->wait_notification(); !more) return more.error();
    }
}

}  // namespace

void add_ps(CLI::App& app, Session& session) {
    CLI::App* ps = app.add_subcommand("ps", "Show every worker: state, device, memory, requests");
    const auto watch = std::make_shared<bool>(false);
    ps->add_flag("--watch,-w", *watch, "Stay, and show the table again whenever something changes");
    ps->footer(
        "One row a replica. HOST is anonymous and shared memory, GPU the device memory of the process; \"-\" where\n"
        "there is none. With --json: "
        "[{\"model\",\"replica\",\"state\",\"pid\",\"device\",\"host_bytes\",\"gpu_bytes\",\n"
        "\"requests\",\"errors\",\"restarts\",\"generation\",…}].\n"
        "\nExamples:\n  bulkhead ps\n  bulkhead ps --watch\n  bulkhead ps --json | python3 -m json.tool\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers.");
    ps->callback([&session, watch] {
        if (*watch && session.json)
            throw CLI::ValidationError("--watch", "prints many tables, --json one document: choose one");
        session.command = [&session, watch] { return *watch ? watch_workers(session) : show_workers(session); };
    });
}

void add_why(CLI::App& app, Session& session) {
    CLI::App* why = app.add_subcommand("why", "Say in a sentence why a model is in its state");
    const auto model = std::make_shared<std::string>();
    why->add_option("NAME", *model, "A model of the fleet")->required();
    why->footer("Also how long each replica has been there, how its last process ended, and what its CUDA Graphs did.\n"
                "With --json: {\"model\",\"state\",\"sentence\",\"replicas\",\"graphs\"}.\n"
                "\nExample:\n  bulkhead why minilm\n"
                "\nExit status: 0 done, 1 failed (model_unknown), 3 no daemon answers.");
    why->callback([&session, model] { session.command = [&session, model] { return show_why(session, *model); }; });
}

void add_info(CLI::App& app, Session& session) {
    CLI::App* info = app.add_subcommand("info", "Show the daemon: version, processes, fleet, GPUs");
    info->footer(
        "With --json: "
        "{\"version\",\"keeper_pid\",\"supervisor_pid\",\"socket\",\"fleet\",\"uptime_s\",\"torch\",\"gpus\",…}.\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers.");
    info->callback([&session] { session.command = [&session] { return show_info(session); }; });
}

void add_logs(CLI::App& app, Session& session) {
    CLI::App* logs = app.add_subcommand("logs", "Show what a model's processes printed");
    const auto options = std::make_shared<Logs>();
    logs->add_option("NAME", options->model, "A model of the fleet")->required();
    logs->add_option("--lines,-n", options->lines, "How many of the latest lines")
        ->check(CLI::Range(0, 2000))
        ->capture_default_str();
    logs->add_flag("--follow,-f", options->follow, "Stay, and show further lines as they come");
    logs->footer(
        "Each line: time, replica#generation, out (what it printed) or daemon (what is said of it), text,\n"
        "with control characters escaped. Lines of "
        "processes that have died are kept, within bounds.\n"
        "With --json: {\"lines\":[{\"time\",\"replica\",\"generation\",\"stream\",\"text\"}]}; with -f one such line "
        "object a line.\n"
        "\nExamples:\n  bulkhead logs minilm\n  bulkhead logs minilm -f -n 0\n"
        "\nExit status: 0 done, 1 failed (model_unknown), 3 no daemon answers, or it ended while followed.");
    logs->callback(
        [&session, options] { session.command = [&session, options] { return show_logs(session, *options); }; });
}

void add_events(CLI::App& app, Session& session) {
    CLI::App* events = app.add_subcommand("events", "Show what happens, as it happens");
    const auto options = std::make_shared<Events>();
    events->add_option("NAME", options->models, "Only these models")->expected(0, -1);
    events->add_option("--count,-n", options->count, "End after so many events")->check(CLI::PositiveNumber);
    events->footer(
        "Changes of state with their reason, progress of loads, receipts of unloads; one a line, with --json one\n"
        "object a line. Without -n it ends when the daemon ends, with status 3.\n"
        "\nExamples:\n  bulkhead events\n  bulkhead events minilm -n 10 --json\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers, or it ended meanwhile.");
    events->callback(
        [&session, options] { session.command = [&session, options] { return show_events(session, *options); }; });
}

}  // namespace bulkhead::cli
