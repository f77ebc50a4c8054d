/// The commands that print one report: why, info, crashes, gpus.

#include <cstdio>

#include <fmt/format.h>

#include "bulkhead/channel.h"
#include "clients/cli/commands/command.h"
#include "clients/cli/commands/doctor.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"

namespace bulkhead::cli {
namespace {

/// Whether a capture has failed, or has ended the process, so that its requests run eagerly.
bool has_lost_graphs(const json::value& why) {
    const json::value& graphs = member(why, "graphs");
    return !array_member(graphs, "failures").empty() || !member(graphs, "degraded").is_null();
}

int show_why(const Session& session, const std::string& model) {
    json::value why = session.ask("model.why", {{"model", model}});
    if (!session.json) print(render_why(why, Style::of(stdout)));
    if (has_lost_graphs(why))
        if (const auto doctor = doctor_of(session, model)) {
            if (!session.json) print(fmt::format("  `bulkhead doctor {}`:\n", one_line(model)));
            json::object findings = quoted_findings(*doctor);
            if (!session.json) return print(render_findings(findings));
            why.as_object()["doctor"] = std::move(findings);
        }
    return session.json ? print_json(why) : exit_done;
}

/// Shows the methods from the worker's welcome, so it loads the model if need be.
int show_methods(const Session& session, const std::string& model) {
    ControlClient control = session.connect();
    const Channel channel = Channel::open(control, model, {.client = "bulkhead info", .deadline = {}}).value();
    if (session.json) return print_json({{"model", model}, {"methods", channel.methods()}});
    return print(render_methods(channel.methods(), Style::of(stdout)));
}

int show_info(const Session& session) {
    const json::value info = session.ask("daemon.info");
    return session.json ? print_json(info) : print(render_info(info, Style::of(stdout)));
}

struct Crashes {
    std::string model;  ///< empty: all
    int limit = 0;      ///< 0: not given
    bool full = false;
};

int show_crashes(const Session& session, const Crashes& crashes) {
    json::object params{{"limit", crashes.limit > 0 ? crashes.limit : limits::crashes_shown}};
    if (!crashes.model.empty()) params["model"] = crashes.model;
    const json::value answer = session.ask("crashes.list", std::move(params));
    const json::array& reports = array_member(answer, "crashes");
    if (reports.empty() && !crashes.model.empty())
        // Refuses a model that the fleet does not know.
        (void)session.ask("model.why", {{"model", crashes.model}});
    if (session.json) return print_json(answer);
    const Style style = Style::of(stdout);
    // For one model, the newest in full, or as many as asked for; earlier ones in one line each.
    const std::size_t in_full = crashes.full || (!crashes.model.empty() && crashes.limit > 0) ? reports.size()
                                : crashes.model.empty()                                       ? 0
                                                                                              : 1;
    std::string text;
    for (std::size_t i = 0; i < std::min(in_full, reports.size()); ++i)
        text += (i > 0 ? "\n" : "") + render_crash_report(reports[i], style);
    if (reports.size() > in_full || reports.empty()) {
        const json::array rest(reports.begin() + static_cast<std::ptrdiff_t>(std::min(in_full, reports.size())),
                               reports.end());
        text += (text.empty() ? "" : "\nBefore it:\n") + render_crashes(rest, style);
    }
    if (const json::value& lost = member(answer, "lost"); lost.is_object()) text += render_lost_crashes(lost);
    return print(text);
}

int show_gpus(const Session& session, const std::string& lifted) {
    if (!lifted.empty()) {
        const json::value was = session.ask("gpu.lift", {{"uuid", lifted}});
        if (session.json) return print_json(was);
        return print(fmt::format("{} is used again; it was quarantined: {}\n", one_line(lifted),
                                 one_line(text_member(was, "was"))));
    }
    const json::value status = session.ask("gpu.status");
    return session.json ? print_json(status) : print(render_gpus(status, Style::of(stdout)));
}

}  // namespace

void add_why(CLI::App& app, Session& session) {
    CLI::App* why = app.add_subcommand("why", "Say in a sentence why a model is in its state");
    const auto model = add_name(why, "A model of the fleet");
    why->footer(
        "Also how long each replica has been there, how its last process ended, where its crash report lies,\n"
        "and what its CUDA Graphs did; of a model that generates its slots, its speed, and the steps of each\n"
        "bucket. Of an engine in Python that lost its graphs it runs `bulkhead doctor NAME`, which takes\n"
        "seconds, and quotes up to 8 findings.\n"
        "With --json: {\"model\",\"state\",\"sentence\",\"replicas\",\"graphs\",\"generate\"}; of such an engine also\n"
        "\"doctor\": {\"findings\",\"more\"}.\n"
        "\nExample:\n  bulkhead why minilm\n\nExit status: 0 done, 1 failed (model_unknown), 3 no daemon answers.");
    when_chosen(why, session, [&session, model] { return show_why(session, *model); });
}

void add_info(CLI::App& app, Session& session) {
    CLI::App* info =
        app.add_subcommand("info", "Show the daemon: version, processes, fleet, GPUs; or what a model takes and gives");
    const auto model = std::make_shared<std::string>();
    info->add_option("--model", *model, "Show this model's methods instead; it is loaded if need be");
    info->footer(
        "CONTAINMENT says what ends a worker's own children: a cgroup, or their process group and a marker.\n"
        "The start of a supervisor is counted under its keeper: the second means that one died, or was\n"
        "upgraded.\n"
        "With --json: {\"version\",\"keeper_pid\",\"supervisor_pid\",\"socket\",\"fleet\",\"uptime_s\",\"torch\",\n"
        "\"gpus\",…}; of a model {\"model\",\"methods\"}.\n"
        "\nExamples:\n  bulkhead info\n  bulkhead info --model minilm\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers.");
    when_chosen(info, session, [&session, model] {
        return model->empty() ? show_info(session) : show_methods(session, *model);
    });
}

void add_crashes(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("crashes", "Show the processes that died unasked, and why");
    const auto crashes = std::make_shared<Crashes>();
    command->add_option("NAME", crashes->model, "Only this model's, and the newest in full");
    command->add_option("--limit,-n", crashes->limit, "At most this number, the newest; of NAME, all in full")
        ->check(CLI::Range(1, 1000));
    command->add_flag("--full", crashes->full, "Whole reports instead of a line each");
    command->footer(
        "A line each: when, who, how it ended, the cause in a sentence. A report has the backtrace, the last\n"
        "lines that the process printed, the request it was running (names and shapes, never contents), its\n"
        "memory, and what the kernel or the driver said. Reports are files in logs/crashes/ beside the\n"
        "control socket; the oldest go first.\n"
        "With --json: {\"crashes\":[report…],\"lost\":null}, newest first; `lost` counts reports that could not\n"
        "be written.\n"
        "\nExamples:\n  bulkhead crashes\n  bulkhead crashes minilm\n  bulkhead crashes minilm --limit 3\n"
        "\nExit status: 0 done, also when there are none; 1 failed, 3 no daemon answers.");
    when_chosen(command, session, [&session, crashes] { return show_crashes(session, *crashes); });
}

void add_gpus(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("gpus", "Show the GPUs, or lift the quarantine of one");
    const auto lifted = std::make_shared<std::string>();
    command->add_option("--lift", *lifted, "Use this GPU again")->type_name("UUID");
    command->footer(
        "A GPU is quarantined, which means that nothing new is started on it, when a process on it outlives\n"
        "SIGKILL, or when three different models failed on it within a minute: then it is the GPU, and none\n"
        "of the models.\n"
        "With --json: {\"nvml\",\"reason\",\"gpus\":[{\"index\",\"uuid\",\"name\",\"quarantined\",\"total_bytes\",\n"
        "\"free_bytes\",\"processes\",…}]}; with --lift {\"uuid\",\"was\"}.\n"
        "\nExamples:\n  bulkhead gpus\n  bulkhead gpus --lift GPU-8f6c…\n"
        "\nExit status: 0 done, 1 failed (such as to lift what is not quarantined), 3 no daemon answers.");
    when_chosen(command, session, [&session, lifted] { return show_gpus(session, *lifted); });
}

}  // namespace bulkhead::cli
