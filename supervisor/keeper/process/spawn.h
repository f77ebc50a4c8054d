#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include <boost/system/result.hpp>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "ipc/links/keeper_link.h"

namespace bulkhead::keeper {

using keeper_link::SpawnStep;

/// What a child becomes. The caller keeps ownership of everything.
struct SpawnRecipe {
    const char* program = nullptr;  ///< a path, not searched for
    char* const* argv = nullptr;
    char* const* environment = nullptr;
    /// Entry i becomes the child's descriptor i; the child has no others. Each number is i already,
    /// or above all targets, as `reserve_low_descriptors` arranges.
    std::span<const int> descriptors;
    int cgroup_fd = -1;                             ///< the child starts inside it
    std::optional<std::uint64_t> core_bytes_max{};  ///< RLIMIT_CORE, never above the keeper's
                                                    ///< own hard limit
    int oom_score_adj = 0;
};

struct Child {
    pid_t pid = -1;
    UniqueFd pidfd;
};

struct SpawnFailure {
    SpawnStep step = SpawnStep::none;
    int error_number = 0;
};

template <typename T>
using SpawnResult = boost::system::result<T, SpawnFailure>;

/// Starts children. Each has its own process group, gets SIGKILL when the keeper dies, an empty
/// signal mask and exactly the descriptors of the recipe.
///
/// Uses a plain copy-on-write clone3() of this small process. The keeper waits until the child has
/// executed its program or failed (CLONE_VFORK), so the outcome is known on return.
/// Owns    one shared page in which a child reports where it failed; needs no descriptor and,
///         unlike a pipe, cannot fail
/// Thread  the only one: the parent-death signal follows the thread that spawned
class Spawner {
public:
    static Result<Spawner> make();

    /// On failure nothing of the child remains, not even a zombie.
    [[nodiscard]] SpawnResult<Child> spawn(const SpawnRecipe& recipe) noexcept;

private:
    explicit Spawner(SpawnFailure* page) noexcept;
    SpawnFailure* failure_;  ///< mapped for the life of the process
    pid_t keeper_pid_;
    std::uint64_t core_hard_limit_;
};

/// Safe in a child after clone(). Raising the score needs no privilege; if lowering is not
/// permitted, or /proc is missing, the score stays.
void set_own_oom_score(int score) noexcept;

enum class Inherited : std::uint8_t { closed, kept };

/// Fills closed ones of 0, 1 and 2 with /dev/null. Closes all other inherited descriptors, unless a
/// former program of this process left them. Occupies the numbers that children use, so that the
/// keeper's descriptors never have them.
/// Returns  /dev/null
Result<UniqueFd> reserve_low_descriptors(Inherited others);

}  // namespace bulkhead::keeper
