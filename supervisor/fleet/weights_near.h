#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/fleet.h"
#include "supervisor/base/blocking_queue.h"
#include "supervisor/base/deadline.h"
#include "supervisor/memory/declaration.h"

namespace bulkhead::supervisor {

/// How much of some files is in the page cache.
struct CachedFiles {
    std::uint64_t bytes = 0;   ///< size of all files
    std::uint64_t cached = 0;  ///< see `bulkhead::cached_bytes`
};

/// Returns the files that a load of the model reads: all in a folder; for an AOTInductor package,
/// the files that the package cache has unpacked. Empty if there are none.
/// `package_cache`  see make_package_cache
[[nodiscard]] std::vector<std::filesystem::path> weight_files(const config::ModelSpec& model,
                                                              const std::filesystem::path& package_cache);

/// Counts the cached bytes and asks the kernel to read missing ones, at most `read_max` bytes.
/// `posix_fadvise` submits the reads without waiting for them. Blocks for the disk.
[[nodiscard]] CachedFiles read_ahead(const std::vector<std::filesystem::path>& files, std::uint64_t read_max);

/// A model whose files may be kept in the page cache.
struct NearCandidate {
    std::string model;
    memory::Bytes bytes = 0;       ///< size of its files
    bool asked = false;            ///< `preload: near`
    bool loaded = false;           ///< or loading: its files are not needed before its next load
    std::int64_t unloaded_ms = 0;  ///< unix time; 0: not loaded since this supervisor started
};

/// Returns the models whose files to keep, most important first: of the models not loaded, those
/// with `preload: near`, then the last unloaded. Skips a model that no longer fits within `bound`,
/// and one that neither asked nor was loaded.
[[nodiscard]] std::vector<std::string> choose_near(std::vector<NearCandidate> candidates, memory::Bytes bound);

/// Keeps the files of the models likely to be loaded next in the page cache: at most the fleet's
/// `near`, and half of the machine's available memory, so that the kernel does not evict what
/// was just read.
///
/// Looks every `near_look_every`, since the kernel does not report evictions. A thread of its own
/// asks the disk: a slow disk must not delay readers of /proc. Does nothing if `near` is 0.
///
/// Thread  the loop
class WeightsNear {
public:
    using Candidates = std::function<std::vector<NearCandidate>()>;

    /// `fleet`       outlives this
    /// `candidates`  all models, without the sizes of their files
    WeightsNear(boost::asio::io_context& io, const config::Fleet& fleet, std::filesystem::path package_cache,
                Candidates candidates);
    /// Looks now, then repeatedly.
    void look();
    /// Ends without waiting for reads, which must not delay the end of the process. False:
    /// as BlockingQueue::end.
    [[nodiscard]] bool end();
    /// Returns whether all files of the model were in the page cache at the last look; empty:
    /// unknown, or no files.
    [[nodiscard]] std::optional<bool> is_near(const std::string& model) const;

private:
    using Seen = std::map<std::string, CachedFiles>;

    const config::Fleet& fleet_;
    const std::filesystem::path package_cache_;
    Candidates candidates_;
    Seen seen_;
    Deadline next_look_;
    BlockingQueue disk_;
};

}  // namespace bulkhead::supervisor
