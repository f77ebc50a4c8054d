#include "worker/package/package_metadata.h"

#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <sstream>
#include <vector>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "worker/model/load_limits.h"
#include "worker/model/model.h"

namespace bulkhead::worker {
namespace {

namespace fs = std::filesystem;

/// Inductor's names of vector instruction sets, and the CPU flags they need
/// (torch/_inductor/cpu_vec_isa.py).
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> vector_sets{{
    {"AVX2", "avx2 fma f16c"},
    {"AVX512", "avx512f avx512dq avx512vl avx512bw fma"},
    {"AVX512_VNNI", "avx512_vnni"},
    {"AMX_TILE", "amx_tile amx_bf16 amx_int8"},
    {"ASIMD", "asimd"},
}};

std::vector<std::string> words(const std::string& text) {
    std::istringstream stream{text};
    return {std::istream_iterator<std::string>{stream}, {}};
}

std::string read_cpu_flags() {
    std::ifstream cpuinfo{"/proc/cpuinfo"};
    for (std::string line; std::getline(cpuinfo, line);)
        if (line.starts_with("flags") || line.starts_with("Features"))  // x86, Arm
            return line.substr(std::min(line.find(':') + 1, line.size())) + " ";
    return {};
}

/// "2.11" of "2.11.0+cu130": AOTInductor's C interface is stable within a minor release.
std::string_view minor_release(std::string_view version) {
    const auto second_dot = version.find('.', version.find('.') + 1);
    return version.substr(0, second_dot);
}

Result<std::map<std::string, std::string>> read_metadata(const fs::path& file) {
    std::ifstream stream{file, std::ios::binary};
    std::string text(limits::package_text_bytes_max, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<std::size_t>(stream.gcount()));
    try {
        std::map<std::string, std::string> metadata;
        const auto parsed = boost::json::parse(text);
        for (const auto& [key, value] : parsed.as_object()) metadata.emplace(key, value.as_string());
        return metadata;
    } catch (const std::exception& exception) {
        return Error{ErrorCode::load_failed,
                     fmt::format("reading {} of the package: {}", file.filename().string(), exception.what()),
                     "export the model again with torch._inductor.aoti_compile_and_package"};
    }
}

/// CPU flags that the code may use and this CPU lacks.
std::vector<std::string> missing_flags(const CompiledModel& model, const std::string& present) {
    std::vector<std::string> wanted = words(model.fact("BULKHEAD_CPU_FLAGS"));
    for (const auto& set : words(model.fact("AOTI_CPU_ISA")))
        for (const auto& [name, flags] : vector_sets)
            if (name == set) std::ranges::copy(words(std::string{flags}), std::back_inserter(wanted));

    std::ranges::sort(wanted);
    const auto repeated = std::ranges::unique(wanted);
    wanted.erase(repeated.begin(), repeated.end());
    std::erase_if(wanted, [&](const std::string& flag) { return present.find(" " + flag + " ") != std::string::npos; });
    return wanted;
}

}  // namespace

std::string CompiledModel::fact(const std::string& key) const {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string{} : found->second;
}

Machine Machine::here(std::string device, std::string compute_capability) {
    utsname name{};
    ::uname(&name);
    return {.device = std::move(device),
            .architecture = name.machine,
            .cpu_flags = read_cpu_flags(),
            .compute_capability = std::move(compute_capability),
            .torch = torch_version()};
}

Result<CompiledModel> find_compiled_model(const fs::path& unpacked) {
    std::vector<fs::path> libraries;
    std::error_code error;
    for (const auto& item : fs::recursive_directory_iterator{unpacked / "data" / "aotinductor", error})
        if (item.path().extension() == ".so") libraries.push_back(item.path());
    if (libraries.empty())
        return Error{ErrorCode::load_failed, "looking for the compiled model: no .so in the package",
                     "export without package_cpp_only: Bulkhead runs what was compiled, and compiles nothing"};
    if (libraries.size() > 1)
        return Error{ErrorCode::load_failed,
                     fmt::format("looking for the compiled model: the package has {}", libraries.size()),
                     "export each model into a package of its own"};

    CompiledModel model{libraries.front(), libraries.front().parent_path(), {}};
    const auto file = model.folder / (model.library.stem().string() + "_metadata.json");
    if (fs::exists(file, error)) {
        auto metadata = read_metadata(file);
        if (!metadata) return metadata.error();
        model.metadata = std::move(metadata.value());
    }
    return model;
}

Result<> check_compatible(const CompiledModel& model, const Machine& machine) {
    const auto incompatible = [](std::string what, std::string remedy) {
        return Error{ErrorCode::package_incompatible, "checking the package: " + std::move(what), std::move(remedy)};
    };
    const auto differs = [&](const char* key, std::string_view here) {
        const std::string there = model.fact(key);
        return !there.empty() && there != here;
    };

    if (differs("AOTI_DEVICE_KEY", machine.device))
        return incompatible(
            fmt::format("it was exported for \"{}\", this worker's device is \"{}\"", model.fact("AOTI_DEVICE_KEY"),
                        machine.device),
            fmt::format("export it with model and inputs on \"{}\", or change the model's `device`", machine.device));
    if (differs("AOTI_PLATFORM", machine.platform) || differs("AOTI_MACHINE", machine.architecture))
        return incompatible(fmt::format("it was exported on {} {}, this is {} {}", model.fact("AOTI_PLATFORM"),
                                        model.fact("AOTI_MACHINE"), machine.platform, machine.architecture),
                            "export it again on a machine like this one");
    if (const auto missing = missing_flags(model, machine.cpu_flags); !missing.empty())
        return incompatible(fmt::format("its code uses {}, which this CPU lacks", fmt::join(missing, ", ")),
                            "export it again on a machine with this one's CPU");
    if (machine.device == "cuda" && differs("AOTI_COMPUTE_CAPABILITY", machine.compute_capability))
        return incompatible(fmt::format("it was compiled for compute capability {}, this GPU has {}",
                                        model.fact("AOTI_COMPUTE_CAPABILITY"), machine.compute_capability),
                            "export it again on a GPU of this kind");
    if (const std::string torch = model.fact("BULKHEAD_TORCH");
        model.metadata.contains("BULKHEAD_TORCH") && minor_release(torch) != minor_release(machine.torch))
        return incompatible(fmt::format("it was exported with torch {}, this worker has {}", torch, machine.torch),
                            fmt::format("export it again with torch {}", minor_release(machine.torch)));
    return {};
}

bool may_write_inputs(const CompiledModel& model, std::size_t inputs) {
    const std::string written = model.fact("BULKHEAD_MUTATED_ARGUMENTS");
    if (written.empty()) return true;
    if (written == "none") return false;
    return std::ranges::any_of(words(written), [&](const std::string& position) {
        std::size_t argument = 0;
        const auto [end, error] = std::from_chars(position.data(), position.data() + position.size(), argument);
        return error != std::errc{} || end != position.data() + position.size() || argument < inputs;
    });
}

}  // namespace bulkhead::worker
