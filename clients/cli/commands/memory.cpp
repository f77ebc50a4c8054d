/// The commands about memory: plan, pin.

#include <fmt/format.h>

#include "clients/cli/commands/command.h"
#include "clients/cli/text/json_access.h"
#include "clients/cli/text/output.h"
#include "clients/cli/text/render.h"

namespace bulkhead::cli {
namespace {

int show_plan(const Session& session, const std::string& model) {
    const json::value plan = session.ask("fleet.plan", {{"model", model}});
    return session.json ? print_json(plan) : print(render_plan(plan));
}

int pin(const Session& session, const std::string& model, bool shall) {
    const json::value answer = session.ask("model.pin", {{"model", model}, {"pin", shall}});
    if (session.json) return print_json(answer);
    return print(fmt::format("{} {}\n", one_line(model),
                             shall ? "stays when others need room" : "may be unloaded when others need room"));
}

}  // namespace

void add_plan(CLI::App& app, Session& session) {
    CLI::App* plan = app.add_subcommand("plan", "Say what a load would do: where, for whom room is made, how long");
    const auto model = add_name(plan, "A model whose device has a limit");
    plan->footer(
        "Nothing is loaded. With --json: {\"model\",\"outcome\",\"loads\":[…],\"evicts\":[…],\"expected_ms\",\n"
        "\"reason\"}; `outcome` is one of serves, loads, fits, evicts, waits, refused.\n"
        "\nExample:\n  bulkhead plan smollm2\n\nExit status: 0 done, 1 failed (model_unknown), 3 no daemon answers.");
    when_chosen(plan, session, [&session, model] { return show_plan(session, *model); });
}

void add_pin(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("pin", "Keep a model loaded: it is not unloaded to make room for others");
    const auto model = add_name(command, "A model whose device has a limit");
    const auto off = std::make_shared<bool>(false);
    command->add_flag("--off", *off, "It may be unloaded again");
    command->footer(
        "Holds until the fleet file is read again, or another supervisor takes over;\n"
        "`pin: true` in the file holds for good.\n"
        "With --json: {\"model\",\"pin\"}.\n"
        "\nExamples:\n  bulkhead pin smollm2\n  bulkhead pin smollm2 --off\n"
        "\nExit status: 0 done, 1 failed (model_unknown), 3 no daemon answers.");
    when_chosen(command, session, [&session, model, off] { return pin(session, *model, !*off); });
}

}  // namespace bulkhead::cli
