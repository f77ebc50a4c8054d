#include "supervisor/keeper_link/keeper_file.h"

#include <unistd.h>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/error.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"

namespace bulkhead::supervisor {

KeeperFile::KeeperFile(std::filesystem::path path, const char* loss, Of whose)
    : path_{std::move(path)}, loss_{loss}, keeper_{whose == Of::every_keeper
                                                       ? "every"
                                                       : process_identity(::getppid()).value_or("")} {}

void KeeperFile::save(json::object content) const {
    if (keeper_.empty())
        return spdlog::warn("{} is not written: /proc does not name the keeper; {}", path_.string(), loss_);
    content["keeper"] = keeper_;
    const int failed = replace_file(path_, path_.string() + ".new", json::serialize(content));
    if (failed != 0)
        spdlog::warn("{}; {}", system_error(fmt::format("writing {}", path_.string()), failed).attempt, loss_);
}

std::optional<json::object> KeeperFile::load() const {
    const auto text = read_file(path_.string(), limits::keeper_file_bytes_max);
    if (!text) return std::nullopt;
    boost::system::error_code ec;
    json::value content = json::parse(*text, ec);
    if (ec || !content.is_object()) {
        spdlog::warn("{} is ignored: it is not a JSON object", path_.string());
        return std::nullopt;
    }
    if (keeper_.empty() || member<std::string>(content.get_object(), "keeper") != keeper_) return std::nullopt;
    return std::move(content.get_object());
}

}  // namespace bulkhead::supervisor
