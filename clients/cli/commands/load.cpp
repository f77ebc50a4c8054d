/// The commands that change which models run: load, unload, restart.

#include <cstdio>

#include "clients/cli/commands/command.h"
#include "clients/cli/commands/follow.h"
#include "clients/cli/tensors/inputs.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/limits.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/progress.h"
#include "clients/cli/text/render.h"
#include "config/scalars.h"

namespace bulkhead::cli {
namespace {

struct Choice {
    std::vector<std::string> models;
    bool all = false;
    std::string deadline;  ///< as typed; empty if not given

    [[nodiscard]] json::object params() const {
        if (all) return {{"all", true}};
        return {{"models", json::value_from(models)}};
    }
};

std::shared_ptr<Choice> add_choice(CLI::App* command) {
    auto choice = std::make_shared<Choice>();
    auto* names = command->add_option("NAME", choice->models, "Models of the fleet")->expected(0, -1);
    command->add_flag("--all,-a", choice->all, "All models of the fleet")->excludes(names);
    command->parse_complete_callback([choice] {
        if (choice->models.empty() && !choice->all) throw CLI::ValidationError("NAME", "name a model, or say --all");
    });
    return choice;
}

/// Calls a method and shows its progress. Loads may take minutes; the fleet file bounds them.
json::value call_with_progress(const Session& session, std::string_view method, const Choice& choice) {
    ControlClient control = session.connect();
    report_new_supervisors(session, control);
    Progress progress{is_terminal(stderr)};
    if (!session.json) {
        control.on_notification([&](std::string_view name, const json::object& params) {
            if (name == "event") progress.on_event(params);
        });
        json::object wanted;
        if (!choice.all) wanted["models"] = json::value_from(choice.models);
        report_new_supervisors(session, control, [&control, wanted] {
            // On failure: no progress.
            static_cast<void>(control.call("events.subscribe", wanted, limits::answer));
        });
        (void)control.call("events.subscribe", wanted, limits::answer).value();
    }
    json::object params = choice.params();
    if (const auto deadline = config::parse_duration(choice.deadline)) params["deadline_ms"] = deadline->count();
    return control.call(method, std::move(params)).value().result;
}

int load(const Session& session, const Choice& choice) {
    const json::value result = call_with_progress(session, "model.load", choice);
    const json::array& models = array_member(result, "models");
    return session.json ? print_json(models) : print(render_loaded(models, Style::of(stdout)));
}

int unload(const Session& session, const Choice& choice) {
    ControlClient control = session.connect();
    report_new_supervisors(session, control);
    const Answer answer = control.call("model.unload", choice.params()).value();
    if (session.json) return print_json(answer.result);
    return print(render_receipts(array_member(answer.result, "receipts"), Style::of(stdout)));
}

int restart(const Session& session, const Choice& choice) {
    const json::value result = call_with_progress(session, "model.restart", choice);
    if (session.json) return print_json(result);
    const Style style = Style::of(stdout);
    return print(render_receipts(array_member(result, "receipts"), style) + "\n" +
                 render_loaded(array_member(result, "models"), style));
}

}  // namespace

void add_load(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("load", "Load models; return when they are ready");
    const auto choice = add_choice(command);
    take_duration(command->add_option("--deadline", choice->deadline,
                                      "Give up after so long, such as 90s; the model's own without it"));
    command->footer(
        "Ready means: loaded, warmed up, its graphs captured, one inference done. A bar shows how it goes;\n"
        "where standard error is not a terminal, a line per phase. A model that is loaded already is simply\n"
        "ready. It also lifts a quarantine. If the supervisor dies, the load goes on under the next one.\n"
        "With --json: [{\"model\",\"replica\",\"state\",\"pid\",\"ms\"}].\n"
        "\nExamples:\n  bulkhead load minilm\n  bulkhead load --all --deadline 5m\n"
        "\nExit status: 0 all are ready, 1 the first one failed and why, 3 no daemon answers, 78 the model's\n"
        "configuration is invalid.");
    when_chosen(command, session, [&session, choice] { return load(session, *choice); });
}

void add_unload(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("unload", "End models' processes; return when their memory is back");
    const auto choice = add_choice(command);
    command->footer(
        "What is in flight may finish within the model's drain deadline; then SIGTERM, then SIGKILL. A\n"
        "receipt per process tells how it ENDED (drained, terminated, killed, crashed), what came back, and\n"
        "whether that was VERIFIED by looking after the process was reaped. HELD BY names who still keeps\n"
        "some of its memory.\n"
        "With --json: {\"receipts\":[{\"model\",\"pid\",\"ended\",\"exit\",\"ms\",\"host_bytes\",\"gpu_bytes\",\n"
        "\"verified\",\"held_by\",…}]}.\n"
        "\nExamples:\n  bulkhead unload minilm silero-vad\n  bulkhead unload --all\n"
        "\nExit status: 0 done, 1 failed, 3 no daemon answers. An unverified receipt is not a failure: it is in\n"
        "the table.");
    when_chosen(command, session, [&session, choice] { return unload(session, *choice); });
}

void add_restart(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("restart", "Unload models and load them again; also lifts a quarantine");
    const auto choice = add_choice(command);
    command->footer(
        "If the supervisor dies meanwhile, the next one is asked again: a model may then be restarted twice.\n"
        "With --json: {\"models\":[…],\"receipts\":[…]}, as load and unload have them.\n"
        "\nExamples:\n  bulkhead restart minilm\n  bulkhead restart --all\n"
        "\nExit status: 0 all are ready again, 1 failed, 3 no daemon answers.");
    when_chosen(command, session, [&session, choice] { return restart(session, *choice); });
}

}  // namespace bulkhead::cli
