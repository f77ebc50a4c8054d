#include "supervisor/keeper_link/keeper_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "ipc/base/error.h"
#include "ipc/base/unique_fd.h"
#include "supervisor/base/proc_files.h"

namespace bulkhead::supervisor {

KeeperFile::KeeperFile(std::filesystem::path path, const char* loss, Of whose)
    : path_{std::move(path)}, loss_{loss},
      keeper_{whose == Of::every_keeper ? "every" : process_identity(::getppid()).value_or("")} {}

void KeeperFile::save(json::object content) const {
    content["keeper"] = keeper_;
    const std::string text = json::serialize(content);
    const std::string fresh = path_.string() + ".new";
    ::unlink(fresh.c_str());
    UniqueFd file{::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
    errno = file ? ENOSPC : errno;  // a short write means a full disk and sets no errno
    if (file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
        ::rename(fresh.c_str(), path_.c_str()) == 0)
        return;
    spdlog::warn("{}; {}", system_error(fmt::format("writing {}", path_.string()), errno).attempt, loss_);
    ::unlink(fresh.c_str());
}

std::optional<json::object> KeeperFile::load() const {
    std::ifstream file{path_, std::ios::binary};
    if (!file) return std::nullopt;
    std::ostringstream text;
    text << file.rdbuf();  // a folder or a failing disk gives an empty text; an iterator would throw
    boost::system::error_code ec;
    json::value content = json::parse(text.str(), ec);
    if (ec || !content.is_object()) {
        spdlog::warn("{} is ignored: it is not a JSON object", path_.string());
        return std::nullopt;
    }
    if (keeper_.empty() || member<std::string>(content.get_object(), "keeper") != keeper_) return std::nullopt;
    return std::move(content.get_object());
}

}  // namespace bulkhead::supervisor
