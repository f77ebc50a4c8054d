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

/// What a child is to become. All of it stays the caller's.
struct SpawnRecipe {
    const char* program = nullptr;  ///< a path; no search
    char* const* argv = nullptr;
    char* const* environment = nullptr;
    /// Entry i becomes the child's descriptor i, and nothing else stays open there. Each is its own
    /// number already or above all the targets, as `reserve_low_descriptors` arranges.
    std::span<const int> descriptors;
    int cgroup_fd = -1;                           ///< the child starts inside it
    std::optional<std::uint64_t> core_bytes_max;  ///< RLIMIT_CORE, never above the keeper's own hard limit
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

/// Starts children: its own process group, SIGKILL when the keeper dies, empty signal mask, exactly the
/// descriptors of the recipe.
///
/// A plain copy-on-write clone3() of this small process, in which the keeper waits until the child has
/// executed its program or failed (CLONE_VFORK): so the outcome is known on return.
/// Owns    one shared page through which a child tells where it stopped; it needs no descriptor and
///         cannot fail, as a pipe could
/// Thread  the only one: the parent-death signal follows the thread that spawned
class Spawner {
public:
    static Result<Spawner> make();

    /// On failure nothing of the child is left, not even a zombie.
    [[nodiscard]] SpawnResult<Child> spawn(const SpawnRecipe& recipe) noexcept;

private:
    explicit Spawner(SpawnFailure* page) noexcept;
    SpawnFailure* failure_;  ///< mapped for the life of the process
    pid_t keeper_pid_;
    std::uint64_t core_hard_limit_;
};

/// Safe in a child after clone(). Raising the score needs no privilege; where lowering is not permitted, or
/// /proc is missing, it stays as it is.
void set_own_oom_score(int score) noexcept;

enum class Inherited : std::uint8_t { closed, kept };

/// Fills 0, 1 and 2 with /dev/null where they are closed, closes whatever else was inherited unless it is what a
/// former program of this process left, and takes the numbers that children get, so that no descriptor of the
/// keeper is ever one of them.
/// Returns  /dev/null
Result<UniqueFd> reserve_low_descriptors(Inherited others);

}  // namespace bulkhead::keeper
