#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
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

/// Adds the option NAME, a model's name that must be given.
[[nodiscard]] std::shared_ptr<std::string> add_name(CLI::App* command, const std::string& description);

/// Each adds one command to the application; its callback sets `session.command`.
using AddCommand = void(CLI::App& app, Session& session);
AddCommand add_up, add_down, add_ps, add_top, add_load, add_unload, add_restart, add_infer, add_generate, add_logs,
    add_events, add_why, add_plan, add_pin, add_crashes, add_gpus, add_info, add_reload, add_upgrade, add_validate,
    add_doctor;

/// Reads the command line into `session` and sets `session.command`.
/// Returns  an exit status if nothing is left to do: it has shown help or reported wrong usage
[[nodiscard]] std::optional<int> parse(int argc, const char* const* argv, Session& session);

/// Runs the whole program. Returns  its exit status
[[nodiscard]] int run(int argc, const char* const* argv);

/// The exit status for an error of this kind.
[[nodiscard]] int exit_status(ErrorCode code) noexcept;

}  // namespace bulkhead::cli
