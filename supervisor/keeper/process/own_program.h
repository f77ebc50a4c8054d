#pragma once

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "supervisor/keeper/process/spawn.h"

namespace bulkhead::keeper {

/// The options by which one release starts the next, always before all others; for no person's use.
inline constexpr const char* resume_option = "--resume";
inline constexpr const char* check_state_option = "--check-state";
[[nodiscard]] bool starts_from_state(int argc, char** argv) noexcept;

/// The program that this process runs, to be re-executed when it was replaced by another release.
class OwnProgram {
public:
    /// The path it was started by, with its symlinks as they were: what lies there later is the new release.
    /// Where that cannot be told, the path of the file itself.
    static Result<OwnProgram> find(int argc, char** argv);

    [[nodiscard]] const char* path() const noexcept { return path_.c_str(); }

    /// Asks the program at that path, in a process of its own, whether it understands a state.
    ///
    /// Blocks  until that process has ended, `limits::state_check_deadline` at most
    [[nodiscard]] bool understands(int state_fd, Spawner& spawner, int null_fd, int oom_score_adj) noexcept;

    /// Executes it in place, as `PROGRAM --resume FD` and what it was started with. What is to stay open is the
    /// caller's to arrange. Returns only by failing, with errno set.
    void execute(int state_fd) noexcept;

private:
    explicit OwnProgram(std::string path) : path_{std::move(path)} {}
    std::string path_;
    std::array<char, 16> state_number_{};
    std::vector<char*> argv_;  ///< the words lie in the process's own arguments, which never end
};

}  // namespace bulkhead::keeper
