#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "supervisor/base/deadline.h"
#include "supervisor/base/off_loop.h"
#include "supervisor/fleet/page_cache.h"
#include "supervisor/memory/near.h"

namespace bulkhead::supervisor {

/// Keeps the files of the models likely next in the page cache: at most the fleet's `near`, and half of what memory the
/// machine has available, so that the kernel does not evict what was just read.
///
/// Looks at them every `near_look_every`, since the kernel tells nobody what it evicts. A thread of its own asks the
/// disk: a slow one must not delay what reads /proc. Does nothing where `near` is 0.
///
/// Thread  the loop
class WeightsNear {
public:
    using Candidates = std::function<std::vector<memory::NearCandidate>()>;

    /// `fleet`       outlives this
    /// `candidates`  all models, without the bytes of their files
    WeightsNear(boost::asio::io_context& io, const config::Fleet& fleet, std::filesystem::path package_cache,
                Candidates candidates);
    /// Looks, and goes on doing so.
    void look();
    /// Before the process ends, which nothing that is only read ahead may delay. False: as OffLoop::end.
    [[nodiscard]] bool end();
    /// Whether all its files were in the page cache when they were last looked at; empty: that is not known, or there
    /// are none.
    [[nodiscard]] std::optional<bool> is_near(const std::string& model) const;

private:
    using Seen = std::map<std::string, CachedFiles>;

    const config::Fleet& fleet_;
    const std::filesystem::path package_cache_;
    Candidates candidates_;
    Seen seen_;
    Deadline next_look_;
    OffLoop disk_;
};

}  // namespace bulkhead::supervisor
