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

/// What a shell sees. Documented in the help text and in docs/control.md's terms.
enum Exit : int { exit_done = 0, exit_failed = 1, exit_usage = 2, exit_no_daemon = 3, exit_config_invalid = 78 };

/// The options that every command takes, and the command that was chosen.
struct Session {
    std::optional<std::filesystem::path> socket;
    bool json = false;
    /// Returns  an exit status. Throws  ErrorException: why it could not be done
    std::function<int()> command;

    /// Throws  ErrorException, as `ControlClient::connect`
    [[nodiscard]] ControlClient connect() const { return ControlClient::connect(find_socket(socket)).value(); }
    /// Connects and asks one question, which the daemon answers from memory. Throws  ErrorException
    [[nodiscard]] boost::json::value ask(std::string_view method, boost::json::object params = {}) const;
};

/// `run` is the program where the command line names `command`.
void when_chosen(CLI::App* command, Session& session, std::function<int()> run);

/// Each adds one command, or a family of them, to the application; its callback sets `session.command`.
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

/// Reads the command line into `session`; `session.command` is then what to do.
/// Returns  an exit status where nothing is left to do: help was shown, or wrong usage told
[[nodiscard]] std::optional<int> parse(int argc, const char* const* argv, Session& session);

/// The whole program. Returns  its exit status
[[nodiscard]] int run(int argc, const char* const* argv);

/// The exit status that tells an error of this kind.
[[nodiscard]] int exit_status(ErrorCode code) noexcept;

}  // namespace bulkhead::cli
