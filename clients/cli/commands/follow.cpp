/// The commands that run on across supervisor restarts: events, logs, ps --watch.
#include "clients/cli/commands/follow.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include <fmt/format.h>

#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"
#include "clients/cpp/base/wait_ready.h"

namespace bulkhead::cli {

void tell_note(const Session& session, std::string_view text) {
    const std::string line =
        session.json ? json_text(json::object{{"note", text}}) + "\n"
                     : fmt::format("{} {}\n", Style::of(stderr).paint("note:", Colour::yellow), one_line(text));
    std::fputs(line.c_str(), stderr);
}

void report_new_supervisors(const Session& session, ControlClient& control, std::function<void()> then) {
    control.on_reconnect([&session, then = std::move(then)] {
        tell_note(session, "the supervisor was lost; the next one goes on with this call");
        if (then) then();
    });
}

void Interruption::ask() {
    const Result<Answer> answer = control_.call("daemon.ping", {}, limits::renewal);
    before_ = std::exchange(now_, answer ? integer_member(answer->result, "supervisor_pid").value_or(0) : 0);
}

void Interruption::tell(const Session& session, std::string_view what) const {
    const bool same = now_ == before_ && now_ != 0;
    tell_note(session, same ? fmt::format("the supervisor had closed the connection, as it does when {} are not read "
                                          "in time; some are missing",
                                          what)
                            : fmt::format("the supervisor was restarted; {} in between may be missing", what));
}

std::size_t first_new_line(const json::array& lines, const json::value& last) {
    constexpr std::array members{"time", "replica", "generation", "stream", "text"};
    for (std::size_t i = lines.size(); i > 0; --i)
        if (std::ranges::all_of(members, [&](std::string_view key) {
                return text_member(lines[i - 1], key) == text_member(last, key);
            }))
            return i;
    return 0;
}

namespace {

/// False if the subscription ended and should be renewed; the next call finds out whether the
/// daemon has gone.
bool wait_for_more(ControlClient& control) {
    const Result<> waited = control.wait_notification();
    if (!waited && waited.error().code == ErrorCode::not_running) return false;
    waited.value();
    return true;
}

std::string workers_text(const json::value& status) {
    const std::size_t columns_max = is_terminal(stdout) ? terminal_width(stdout) : std::string::npos;
    return render_workers(array_member(status, "models"), Style::of(stdout), columns_max);
}

/// Draws at every event, and once a second for the counters, until the daemon or the reader ends.
int watch_workers(const Session& session) {
    ControlClient control = session.connect();
    Interruption interruption{control};
    interruption.ask();
    (void)control.call("events.subscribe", {}, limits::answer).value();
    bool interrupted = false;
    control.on_reconnect([&] {
        // If it fails, the picture still updates once a second.
        static_cast<void>(control.call("events.subscribe"));
        interrupted = true;
    });
    const bool redraw = is_terminal(stdout);
    for (;;) {
        const Answer status = control.call("fleet.status", {}, limits::renewal).value();
        print((redraw ? "\x1b[H\x1b[2J" : "") + workers_text(status.result) + (redraw ? "" : "\n"));
        if (std::exchange(interrupted, false)) {
            interruption.ask();
            interruption.tell(session, "changes");
        }
        pollfd ready{control.fd(), POLLIN, 0};
        // The next call reads what arrived.
        ::poll(&ready, 1, static_cast<int>(limits::watch.count()));
    }
}

struct Logs {
    std::string model;
    int lines = 100;
    bool follow = false;
};

int show_logs(const Session& session, const Logs& logs) {
    const json::value tail =
        session.ask("logs.tail", {{"model", logs.model}, {"lines", logs.lines}, {"follow", false}});
    if (session.json) return print_json(tail);
    const Style style = Style::of(stdout);
    for (const json::value& line : array_member(tail, "lines")) print(render_log_line(line, style));
    return exit_done;
}

int follow_logs(const Session& session, const Logs& logs) {
    ControlClient control = session.connect();
    const Style style = Style::of(stdout);
    std::optional<json::value> last;
    const auto print_line = [&](const json::value& line) {
        last = line;
        session.json ? print_json(line) : print(render_log_line(line, style));
    };
    std::vector<json::value> arrived;  // new lines may overtake the answer that holds earlier ones
    control.on_notification([&](std::string_view method, const json::object& params) {
        if (method == "log") arrived.emplace_back(params);
    });
    Interruption interruption{control};
    const std::int64_t began = unix_ms();
    for (bool renewed = false;; renewed = true) {
        interruption.ask();
        const int wanted = renewed ? limits::log_lines_max : logs.lines;
        const json::object asked{{"model", logs.model}, {"lines", wanted}, {"follow", true}};
        const Answer tail = control.call("logs.tail", asked, limits::renewal).value();
        if (renewed) interruption.tell(session, "lines");
        const json::array& lines = array_member(tail.result, "lines");
        const bool shown_none = renewed && !last;  // then only lines newer than this
                                                   // command are new
        for (std::size_t i = last ? first_new_line(lines, *last) : 0; i < lines.size(); ++i) {
            if (shown_none && integer_member(lines[i], "time").value_or(0) < began) continue;
            print_line(lines[i]);
        }
        do {
            for (const json::value& line : std::exchange(arrived, {})) print_line(line);
        } while (wait_for_more(control));
    }
}

struct Events {
    std::vector<std::string> models;
    std::int64_t count = 0;  ///< 0: until the daemon ends
    bool follow = true;      ///< also accepted, as in `logs`; implied without a count
};

int show_events(const Session& session, const Events& events) {
    ControlClient control = session.connect();
    std::vector<json::object> arrived;
    control.on_notification([&](std::string_view method, const json::object& params) {
        if (method == "event") arrived.push_back(params);
    });
    json::object params;
    if (!events.models.empty()) params["models"] = json::value_from(events.models);
    const Style style = Style::of(stdout);
    std::int64_t shown = 0;
    Interruption interruption{control};
    for (bool renewed = false;; renewed = true) {
        interruption.ask();
        (void)control.call("events.subscribe", params, limits::renewal).value();
        if (renewed) interruption.tell(session, "events");
        do {
            for (const json::object& event : std::exchange(arrived, {})) {
                session.json ? print_json(event) : print(render_event(event, style));
                if (++shown == events.count) return exit_done;
            }
        } while (wait_for_more(control));
    }
}

int show_workers(const Session& session) {
    const json::value status = session.ask("fleet.status");
    return session.json ? print_json(array_member(status, "models")) : print(workers_text(status));
}

}  // namespace

void add_ps(CLI::App& app, Session& session) {
    CLI::App* ps = app.add_subcommand("ps", "Show every worker: state, device, memory, requests");
    const auto watch = std::make_shared<bool>(false);
    ps->add_flag("--watch,-w", *watch, "Stay, and show the table again whenever something changes");
    ps->footer(
        "One row a replica. HOST is anonymous and shared memory, GPU the device memory of the process; \"-\"\n"
        "where there is none. A state of `adopting` means that a new supervisor has found the process and not\n"
        "yet heard from it: it serves meanwhile. SLOTS and TOKENS/S, where a model generates: sequences now\n"
        "and at most, with those that wait, and the speed of the last one. NOTE, where there is one: what is\n"
        "not as declared, such as graphs that run eagerly.\n"
        "With --json: [{\"model\",\"replica\",\"state\",\"pid\",\"device\",\"host_bytes\",\"gpu_bytes\",\"requests\",\n"
        "\"errors\",\"restarts\",\"generation\",…}].\n"
        "\nExamples:\n  bulkhead ps\n  bulkhead ps --watch\n  bulkhead ps --json | python3 -m json.tool\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers.");
    ps->callback([&session, watch] {
        if (*watch && session.json)
            throw CLI::ValidationError("--watch", "prints many tables, --json one document: choose one");
        session.command = [&session, watch] { return *watch ? watch_workers(session) : show_workers(session); };
    });
}

void add_logs(CLI::App& app, Session& session) {
    CLI::App* logs = app.add_subcommand("logs", "Show what a model's processes printed");
    const auto options = std::make_shared<Logs>();
    logs->add_option("NAME", options->model, "A model of the fleet")->required();
    logs->add_option("--lines,-n", options->lines, "How many of the latest lines")
        ->check(CLI::Range(0, limits::log_lines_max))
        ->capture_default_str();
    logs->add_flag("--follow,-f", options->follow, "Stay, and show further lines as they come");
    logs->footer(
        "Each line: time, replica#generation, out (what it printed) or daemon (what is said of it), text,\n"
        "with control characters escaped. Lines of processes that have died are kept, within bounds. A\n"
        "supervisor that is restarted while lines are followed is named on standard error; no line is shown\n"
        "twice.\n"
        "With --json: {\"lines\":[{\"time\",\"replica\",\"generation\",\"stream\",\"text\"}]}; with -f one such line\n"
        "object a line.\n"
        "\nExamples:\n  bulkhead logs minilm\n  bulkhead logs minilm -f -n 0\n"
        "\nExit status: 0 done, 1 failed (model_unknown), 3 no daemon answers, or it ended while followed.");
    when_chosen(logs, session, [&session, options] {
        return options->follow ? follow_logs(session, *options) : show_logs(session, *options);
    });
}

void add_events(CLI::App& app, Session& session) {
    CLI::App* events = app.add_subcommand("events", "Show what happens, as it happens");
    const auto options = std::make_shared<Events>();
    events->add_option("NAME", options->models, "Only these models")->expected(0, -1);
    events->add_option("--count,-n", options->count, "End after this number of events")->check(CLI::PositiveNumber);
    events->add_flag("--follow,-f", options->follow, "Stay until the daemon ends; it does so anyway without --count");
    events->footer(
        "Changes of state with their reason, progress of loads, receipts of unloads; one a line, with --json\n"
        "one object a line. Without -n it ends when the daemon ends, with status 3. A supervisor that is\n"
        "restarted ends nothing: standard error then says that events may be missing.\n"
        "\nExamples:\n  bulkhead events\n  bulkhead events minilm -n 10 --json\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers, or it ended meanwhile.");
    when_chosen(events, session, [&session, options] { return show_events(session, *options); });
}

}  // namespace bulkhead::cli
