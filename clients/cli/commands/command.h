#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

#include <CLI/CLI.hpp>
#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "ipc/base/error.h"

namespace bulkhead::cli {

/// Exit statuses for shells, documented in the help text and, in its terms, in docs/control.md.
enum Exit : int { exit_done = 0, exit_failed = 1, exit_usage = 2, exit_no_daemon = 3, exit_config_invalid = 78 };

/// The options common to all commands, and the chosen command.
struct Session {
    std::optional<std::filesystem::path> socket;
    bool json = false;
    /// Returns  an exit status. Throws  ErrorException with the reason of a failure
    std::function<int()> command;

    /// Throws  ErrorException, as `ControlClient::connect`
    [[nodiscard]] ControlClient connect() const { return ControlClient::connect(find_socket(socket)).value(); }
    /// Connects and asks one question, which the daemon answers from memory. Throws  ErrorException
    [[nodiscard]] boost::json::value ask(std::string_view method, boost::json::object params = {}) const;
};

/// Makes `run` the program if the command line names `command`.
void when_chosen(CLI::App* command, Session& session, std::function<int()> run);

/// Each adds one command, or a family of commands, to the application; its callback sets `session.command`.
void add_up(CLI::App& app, Session& session);
void add_down(CLI::App& app, Session& session);
void add_ps(CLI::App& app, Session& session);
void add_top(CLI::App& app, Session& session);
void add_load(CLI::App& app, Session& session);
void add_unload(CLI::App& app, Session& session);
void add_restart(CLI::App& app, Session& session);
void add_infer(CLI::App& app, Session& session);
void add_generate(CLI::App& app, Session& session);
void add_logs(CLI::App& app, Session& session);
void add_events(CLI::App& app, Session& session);
void add_why(CLI::App& app, Session& session);
void add_plan(CLI::App& app, Session& session);
void add_pin(CLI::App& app, Session& session);
void add_info(CLI::App& app, Session& session);
void add_crashes(CLI::App& app, Session& session);
void add_gpus(CLI::App& app, Session& session);
void add_upgrade(CLI::App& app, Session& session);
void add_reload(CLI::App& app, Session& session);
void add_validate(CLI::App& app, Session& session);
void add_doctor(CLI::App& app, Session& session);

/// Reads the command line into `session` and sets `session.command`.
/// Returns  an exit status if nothing is left to do: it has shown help or reported wrong usage
[[nodiscard]] std::optional<int> parse(int argc, const char* const* argv, Session& session);

/// Runs the whole program. Returns  its exit status
[[nodiscard]] int run(int argc, const char* const* argv);

/// The exit status for an error of this kind.
[[nodiscard]] int exit_status(ErrorCode code) noexcept;

}  // namespace bulkhead::cli
