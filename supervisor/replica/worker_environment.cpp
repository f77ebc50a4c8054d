#include "supervisor/replica/worker_environment.h"

#include <pwd.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ranges>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/text.h"

namespace bulkhead::supervisor {
namespace {

constexpr std::string_view inherited_names =
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH CUDA_HOME CUDA_PATH XDG_CACHE_HOME HF_HOME "
    "HF_HUB_CACHE NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES ASAN_OPTIONS UBSAN_OPTIONS TSAN_OPTIONS LSAN_OPTIONS";

bool may_pass(std::string_view name) {
    return name.starts_with("LC_") || std::ranges::any_of(std::views::split(inherited_names, ' '), [&](const auto& word) {
               return std::string_view{word.begin(), word.end()} == name;
           });
}

std::filesystem::path cache_home() {
    if (const char* named = std::getenv("XDG_CACHE_HOME"); named != nullptr && named[0] == '/') return named;
    if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/')
        return std::filesystem::path{home} / ".cache";
    const passwd* user = ::getpwuid(::geteuid());
    return user != nullptr ? std::filesystem::path{user->pw_dir} / ".cache" : std::filesystem::path{"/var/cache"};
}

std::optional<std::filesystem::path> find_program(std::string_view folders, std::string_view program) {
    while (!folders.empty()) {
        const auto colon = std::min(folders.find(':'), folders.size());
        if (auto path = std::filesystem::path{folders.substr(0, colon)} / program;
            path.is_absolute() && ::access(path.c_str(), X_OK) == 0)
            return path;
        folders.remove_prefix(std::min(colon + 1, folders.size()));
    }
    return std::nullopt;
}

/// How often a thread of a model that computes in many steps looks for the next parallel region
/// before it sleeps: about 0.6 ms, enough to bridge the gap between two steps but not between two
/// requests. An engine in Python shares the cores with its caller's interpreter, so it looks for
/// 0.06 ms (docs/decisions.md).
constexpr const char* looks_between_steps = "20000";
constexpr const char* looks_of_python = "2000";

/// Returns the declared variables plus defaults for the number of threads and how they wait. On one
/// core no default is set: a spinning thread would keep the working thread from running.
std::map<std::string, std::string> environment_of(const config::ModelSpec& spec, int cores) {
    auto declared = spec.environment;
    const bool is_python = spec.runtime == config::Runtime::python;
    const bool has_steps = is_python || spec.runtime == config::Runtime::generate;
    if (has_steps && cores > 1 && !declared.contains("OMP_WAIT_POLICY"))
        declared.try_emplace("GOMP_SPINCOUNT", is_python ? looks_of_python : looks_between_steps);
    // Read by torch and numpy when an engine, or a blank, imports them.
    if (is_python && spec.threads > 0)
        declared["OMP_NUM_THREADS"] = std::to_string(spec.threads);
    return declared;
}

constexpr std::string_view marker_name = "BULKHEAD_WORKER";

}  // namespace

StartConditions StartConditions::of(const SpawnRequest& request) {
    StartConditions conditions{request.argv, request.environment, request.core_bytes_max};
    std::erase_if(conditions.environment, [](const std::string& entry) {
        return entry.starts_with(marker_name) && entry[marker_name.size()] == '=';
    });
    return conditions;
}

void contain(SpawnRequest& request, Cgroups* cgroups) {
    if (cgroups == nullptr) return;
    if (auto folder = cgroups->add(request.name))
        request.cgroup = std::move(*folder);
    else
        spdlog::warn("worker={} is contained by its process group and marker alone: {}", request.name.text(),
                     folder.error().text());
}

Result<SpawnRequest> WorkerLaunch::request(const WorkerName& worker, const config::ModelSpec& spec,
                                           const std::string& gpu_uuid) const {
    auto program_and_arguments = command(spec);
    if (!program_and_arguments) return program_and_arguments.error();
    SpawnRequest request;
    request.name = worker;
    request.argv = std::move(*program_and_arguments);
    request.environment = environment(worker, gpu_uuid, environment_of(spec, cores));
    request.core_bytes_max = spec.core_bytes_max;
    std::size_t bytes = 0;
    for (const auto& text : request.argv) bytes += text.size() + 1;
    for (const auto& text : request.environment) bytes += text.size() + 1;
    if (bytes > keeper_link::spawn_bytes_max)
        return Error{ErrorCode::config_invalid,
                     fmt::format("starting {}: its environment has {}", worker.label(), bytes_text(bytes)),
                     fmt::format("declare less than {}", bytes_text(keeper_link::spawn_bytes_max))};
    return request;
}

std::string daemon_token(std::int32_t keeper_pid, std::uint64_t keeper_started_unix_ms) {
    return fmt::format("{:x}{:011x}", static_cast<std::uint32_t>(keeper_pid), keeper_started_unix_ms);
}

std::vector<std::string> WorkerLaunch::environment(const WorkerName& worker, const std::string& gpu_uuid,
                                                   const std::map<std::string, std::string>& declared) const {
    auto variables = declared;
    variables.insert(inherited.begin(), inherited.end());
    // libgomp reads it once, at start. Threads that spin between two requests would take cores from
    // other workers.
    variables.try_emplace("OMP_WAIT_POLICY", "passive");
    variables[std::string{marker_name}] = marker(worker);
    variables["BULKHEAD_SOCKET"] = socket;
    variables["BULKHEAD_CACHE"] = cache.string();
    variables["CUDA_VISIBLE_DEVICES"] = gpu_uuid;
    std::vector<std::string> entries;
    for (const auto& [name, value] : variables) entries.push_back(name + "=" + value);
    return entries;
}

Result<std::vector<std::string>> WorkerLaunch::command(const config::ModelSpec& spec) const {
    if (spec.runtime != config::Runtime::python) {
        if (std::error_code ec; !std::filesystem::exists(program, ec))
            return Error{
                ErrorCode::config_invalid, fmt::format("starting a worker of {}: there is no {}", spec.name, program),
                "`torchscript`, `aoti` and `generate` need it: install the wheel bulkhead-gpu-torch beside bulkhead-gpu, "
                "or build Bulkhead with LibTorch"};
        return std::vector{program};
    }
    const auto starting = [&] { return fmt::format("starting engine {}", spec.python.engine); };
    if (std::error_code ec; !std::filesystem::exists(python_start, ec))
        return Error{ErrorCode::config_invalid,
                     fmt::format("{}: there is no {}", starting(), python_start.lexically_normal().string()),
                     "install the Python package of this release there"};
    std::filesystem::path interpreter = spec.python.interpreter;
    if (interpreter.empty()) {
        const auto declared = spec.environment.find("PATH");
        // A venv with the wheel has its Python beside our programs; it need not be activated.
        const std::string path = declared != spec.environment.end()
                                     ? declared->second
                                     : std::filesystem::path{program}.parent_path().string() + ":" +
                                           (inherited.contains("PATH") ? inherited.at("PATH") : "");
        const auto found = find_program(path, "python3");
        if (!found)
            return Error{ErrorCode::config_invalid, fmt::format("{}: no python3 in {}", starting(), path),
                         "name an `interpreter`"};
        interpreter = *found;
    }
    if (::access(interpreter.c_str(), X_OK) != 0)
        return Error{ErrorCode::config_invalid,
                     fmt::format("{}: {} cannot be executed", starting(), interpreter.string()),
                     "name the python of a venv as `interpreter`"};
    // Unbuffered: the engine's output reaches the log before the process ends, however it ends.
    return std::vector{interpreter.string(), std::string{"-u"}, python_start.string()};
}

std::map<std::string, std::string> inheritable(const char* const* environment) {
    std::map<std::string, std::string> variables;
    for (; *environment != nullptr; ++environment) {
        const std::string_view entry{*environment};
        const std::size_t equals = entry.find('=');
        if (equals != std::string_view::npos && may_pass(entry.substr(0, equals)))
            variables.emplace(entry.substr(0, equals), entry.substr(equals + 1));
    }
    return variables;
}

int allowed_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    return ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
}

Result<std::filesystem::path> make_package_cache() {
    const auto path = cache_home() / "bulkhead" / "packages";
    std::error_code ec;
    std::filesystem::create_directories(path.parent_path().parent_path(), ec);
    for (const auto& folder : {path.parent_path(), path}) {
        if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
            return system_error(fmt::format("making the package cache {}", folder.string()), errno);
    }
    struct stat status {};
    if (::lstat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid())
        return Error{ErrorCode::not_permitted,
                     fmt::format("the package cache {} is not a folder of this user", path.string()),
                     "remove it, or set XDG_CACHE_HOME to a folder of yours"};
    if ((status.st_mode & 0077) != 0 && ::chmod(path.c_str(), 0700) != 0)
        return system_error(fmt::format("closing the package cache {} to others", path.string()), errno);
    return path;
}

}  // namespace bulkhead::supervisor
