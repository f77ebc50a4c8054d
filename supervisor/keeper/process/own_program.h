#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "supervisor/keeper/process/spawn.h"

namespace bulkhead::keeper {

/// Options by which one release starts the next, always before all others; not for people.
inline constexpr const char* resume_option = "--resume";
inline constexpr const char* check_state_option = "--check-state";
[[nodiscard]] bool starts_from_state(int argc, char** argv) noexcept;

/// Returns the path of the file that this process runs; " (deleted)" follows if it was replaced.
Result<std::string> program_file(const std::string& attempt);

/// The program that this process runs. Re-executed after another release has replaced it.
class OwnProgram {
public:
    /// Finds the path it was started by, symlinks unresolved: the new release will be there. If
    /// that is unknown, the path of the file itself.
    static Result<OwnProgram> find(int argc, char** argv);

    [[nodiscard]] const char* path() const noexcept { return path_.c_str(); }

    /// Starts the program at that path as a child and asks whether it understands a state.
    ///
    /// Blocks  until that child has ended, at most `limits::state_check_deadline`
    [[nodiscard]] bool understands(int state_fd, Spawner& spawner, int null_fd, int oom_score_adj) noexcept;

    /// Executes the program in place, as `PROGRAM --resume FD` plus the original arguments. The
    /// caller decides which descriptors stay open. Returns only on failure, with errno set.
    void execute(int state_fd) noexcept;

private:
    explicit OwnProgram(std::string path) : path_{std::move(path)} {}
    std::string path_;
    std::array<char, 16> state_number_{};
    std::vector<char*> argv_;  ///< point into the process' own arguments, which never go away
};

}  // namespace bulkhead::keeper
