/// The command that shows the fleet at work: top.

#include "clients/cli/top/top.h"
#include "clients/cli/commands/command.h"

namespace bulkhead::cli {

void add_top(CLI::App& app, Session& session) {
    CLI::App* command = app.add_subcommand("top", "Watch the fleet: memory of each device, rates of each model");
    const auto once = std::make_shared<bool>(false);
    command->add_flag("--once", *once, "Print one frame, with rates over one second, and exit");
    command->footer(
        "A full screen with a bar for each device, a row for each replica, and the latest events. Keys load,\n"
        "unload, restart and pin the chosen model, after a question; ? lists them. Without a terminal, or\n"
        "with TERM=dumb, a frame of plain rows a second. A daemon that goes away is waited for. NO_COLOR is\n"
        "obeyed. REQ/S and TOK/S are of the last second, P50 and P99 of the last requests (of a model that\n"
        "generates, of its steps), QUEUE is requests in its queue + callers that wait until it is loaded,\n"
        "IDLE since the last request, UNLOAD when it goes if none comes. With --once --json: {\"time\",\n"
        "\"models\":[row of `ps` with \"requests_per_second\",\"tokens_per_second\"],\"devices\":[ledger],\"gpus\"}.\n"
        "\nExamples:\n  bulkhead top\n  bulkhead top --once\n\nExit status: 0 done, 1 failed, 3 no daemon answers.");
    command->callback([&session, once] {
        if (session.json && !*once)
            throw CLI::ValidationError("--json", "is one document, top prints many frames: add --once");
        session.command = [&session, once] {
            const std::filesystem::path socket = find_socket(session.socket);
            if (*once) return top::show_once(socket, session.json);
            return top::has_screen() ? top::run_screen(socket) : top::print_rows(socket);
        };
    });
}

}  // namespace bulkhead::cli
