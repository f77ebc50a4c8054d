#include "supervisor/fleet/weights_near.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <tuple>

#include "ipc/base/file_identity.h"
#include "ipc/base/machine_memory.h"
#include "ipc/base/mapping.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/limits.h"

namespace bulkhead::supervisor {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t threads_stuck_max = 1;    ///< threads that a hanging disk may block
constexpr std::uint64_t slice_bytes = 8 << 20;  ///< requested as a whole if any page
                                                ///< of it is missing

/// Adds the regular files of a folder; with a recursive iterator, those of its subfolders too.
template <typename Iterator>
std::vector<fs::path> files_in(const fs::path& folder) {
    std::vector<fs::path> files;
    std::error_code failed;
    for (Iterator entry{folder, failed}, end; !failed && entry != end && files.size() < limits::package_files_max;
         entry.increment(failed))
        if (std::error_code ignored; entry->is_regular_file(ignored)) files.push_back(entry->path());
    return files;
}

void read_ahead_file(const fs::path& path, std::uint64_t& read_left, CachedFiles& all) {
    const UniqueFd fd{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK)};
    struct stat status {};
    if (!fd || ::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) return;
    const auto size = static_cast<std::uint64_t>(status.st_size);
    const Mapping file{size, PROT_READ, MAP_SHARED, fd.get()};
    if (!file) return;
    for (std::uint64_t at = 0; at < size; at += slice_bytes) {
        const std::uint64_t bytes = std::min(slice_bytes, size - at);
        const std::uint64_t cached = cached_bytes(file.bytes().subspan(at, bytes));
        all.bytes += bytes;
        all.cached += cached;
        if (cached == bytes || read_left < bytes) continue;
        read_left -= bytes;
        (void)::posix_fadvise(fd.get(), static_cast<off_t>(at), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
    }
}

}  // namespace

std::vector<std::string> choose_near(std::vector<NearCandidate> candidates, memory::Bytes bound) {
    std::erase_if(candidates, [](const auto& one) { return one.loaded || (!one.asked && one.unloaded_ms == 0); });
    std::ranges::stable_sort(candidates, [](const auto& a, const auto& b) {
        return std::tuple{a.asked, a.unloaded_ms} > std::tuple{b.asked, b.unloaded_ms};
    });
    std::vector<std::string> chosen;
    for (const NearCandidate& one : candidates) {
        if (one.bytes > bound) continue;
        bound -= one.bytes;
        chosen.push_back(one.model);
    }
    return chosen;
}

WeightsNear::WeightsNear(boost::asio::io_context& io, const config::Fleet& fleet, std::filesystem::path package_cache,
                         Candidates candidates)
    : fleet_{fleet}, package_cache_{std::move(package_cache)}, candidates_{std::move(candidates)},
      next_look_{io}, disk_{io, limits::blocking_job_deadline, threads_stuck_max} {}

std::optional<bool> WeightsNear::is_near(const std::string& model) const {
    const auto found = seen_.find(model);
    if (found == seen_.end() || found->second.bytes == 0) return std::nullopt;
    return found->second.cached == found->second.bytes;
}

bool WeightsNear::end() { return disk_.end(limits::near_end_patience); }

void WeightsNear::look() {
    if (fleet_.near_bytes == 0) return;
    disk_.run(
        "keeping weights in the page cache",
        [candidates = candidates_(), models = fleet_.models, bound = fleet_.near_bytes,
         cache = package_cache_]() mutable {
            Seen seen;
            std::map<std::string, std::vector<std::filesystem::path>> files;
            for (std::size_t i = 0; i < models.size(); ++i) {
                const std::string& model = models[i].name;
                files[model] = weight_files(models[i], cache);
                seen[model] = read_ahead(files[model], 0);
                candidates[i].bytes = seen[model].bytes;
            }
            bound = std::min(bound, read_machine_memory().available / 2);
            std::uint64_t left = limits::near_read_max;
            for (const std::string& model : choose_near(std::move(candidates), bound)) {
                const std::uint64_t missing = seen[model].bytes - seen[model].cached;
                if (missing > 0) (void)read_ahead(files[model], left);
                left -= std::min(left, missing);
            }
            return std::pair{std::move(seen), left == 0};
        },
        [this](Result<std::pair<Seen, bool>> looked) {
            if (looked) seen_ = std::move(looked->first);
            const bool is_more = looked && looked->second;
            next_look_.arm(is_more ? limits::near_look_while_reading : limits::near_look_every, [this] { look(); });
        });
}

std::vector<fs::path> weight_files(const config::ModelSpec& model, const fs::path& package_cache) {
    std::error_code failed;
    if (fs::is_directory(model.file, failed)) return files_in<fs::directory_iterator>(model.file);
    struct stat status {};
    if (::stat(model.file.c_str(), &status) != 0) return {};
    if (model.runtime != config::Runtime::aoti) return {model.file};
    const fs::path unpacked = package_cache / "by-file" / file_identity(status);
    return files_in<fs::recursive_directory_iterator>(fs::canonical(unpacked, failed));
}

CachedFiles read_ahead(const std::vector<fs::path>& files, std::uint64_t read_max) {
    CachedFiles all;
    for (const fs::path& file : files) read_ahead_file(file, read_max, all);
    return all;
}

}  // namespace bulkhead::supervisor
