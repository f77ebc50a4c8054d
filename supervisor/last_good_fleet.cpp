#include "supervisor/last_good_fleet.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "config/fleet_json.h"
#include "ipc/unique_fd.h"
#include "supervisor/json_members.h"
#include "supervisor/proc_files.h"

namespace bulkhead::supervisor {
namespace {

/// "4711:123456", the second being its start in clock ticks since boot, field 22 of /proc/PID/stat.
std::string keeper_identity() {
    const pid_t keeper = ::getppid();
    const auto stat = read_proc_file(keeper, "stat", 4096);
    if (!stat) return {};
    std::size_t at = stat->rfind(')');  // the name may contain anything
    for (int field = 2; field < 22 && at != std::string::npos; ++field) at = stat->find(' ', at + 1);
    if (at == std::string::npos) return {};
    return fmt::format("{}:{}", keeper, stat->substr(at + 1, stat->find(' ', at + 1) - at - 1));
}

}  // namespace

LastGoodFleet::LastGoodFleet(const std::filesystem::path& folder)
    : path_{folder / "last-good-fleet.json"}, keeper_{keeper_identity()} {}

void LastGoodFleet::save(const config::Fleet& fleet) const {
    json::array models;
    for (const auto& model : fleet.models) models.push_back(config::to_json(model));
    const std::string text = json::serialize(
        json::object{{"keeper", keeper_}, {"source", fleet.source.string()}, {"models", std::move(models)}});
    const std::string fresh = path_.string() + ".new";
    ::unlink(fresh.c_str());
    UniqueFd file{::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)};
    const bool written = file && ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()) &&
                         ::rename(fresh.c_str(), path_.c_str()) == 0;
    if (written) return;
    spdlog::warn("writing {}: {}; should the fleet file get errors, a new supervisor cannot go on without it",
                 path_.string(), std::strerror(errno));
    ::unlink(fresh.c_str());
}

std::optional<config::Fleet> LastGoodFleet::load() const {
    std::ifstream file{path_, std::ios::binary};
    const std::string text{std::istreambuf_iterator<char>{file}, {}};
    boost::system::error_code ec;
    const json::value document = json::parse(text, ec);
    if (ec || !document.is_object()) return std::nullopt;
    const json::object& all = document.get_object();
    const json::value* models = all.if_contains("models");
    if (keeper_.empty() || string_member(all, "keeper") != keeper_ || models == nullptr || !models->is_array())
        return std::nullopt;
    config::Fleet fleet;
    fleet.source = string_member(all, "source").value_or("");
    for (const json::value& one : models->get_array()) {
        auto model = one.is_object() ? config::model_from_json(one.get_object())
                                     : Result<config::ModelSpec>{Error{ErrorCode::config_invalid, "no object", {}}};
        if (!model) return std::nullopt;
        fleet.models.push_back(std::move(*model));
    }
    return fleet;
}

}  // namespace bulkhead::supervisor
