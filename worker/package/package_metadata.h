#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>

#include "ipc/base/error.h"

namespace bulkhead::worker {

/// One compiled model inside an unpacked package.
struct CompiledModel {
    std::filesystem::path library;                ///< …wrapper.so
    std::filesystem::path folder;                 ///< of its kernels
    std::map<std::string, std::string> metadata;  ///< as AOTInductor and the exporter wrote it
};

/// What a package must fit.
struct Machine {
    std::string device;  ///< "cpu" or "cuda"
    std::string_view platform = "linux";
    std::string architecture;        ///< as uname says: "x86_64"
    std::string cpu_flags;           ///< as /proc/cpuinfo lists them, spaces around each
    std::string compute_capability;  ///< "90"; empty on a CPU
    std::string torch;               ///< "2.11.0"
    static Machine here(std::string device, std::string compute_capability);
};

/// Finds the one compiled model below `data/aotinductor`.
/// Errors  load_failed when there is none, or more than one
[[nodiscard]] Result<CompiledModel> find_compiled_model(const std::filesystem::path& unpacked);

/// Checked before the library is loaded: code for another CPU dies of SIGILL, code for another device in stranger
/// ways. Facts that the metadata lacks are not checked.
/// Errors  package_incompatible naming both sides, and how to export again
[[nodiscard]] Result<> check_compatible(const CompiledModel& model, const Machine& machine);

/// Whether it may write into one of its first `inputs` arguments. Only the exporter knows (BULKHEAD_MUTATED_ARGUMENTS,
/// their positions, or `none`); a package that does not tell may. Older exporters wrote BULKHEAD_WRITTEN_ARGUMENTS,
/// which said `none` of all packages: it is not read.
[[nodiscard]] bool may_write_inputs(const CompiledModel& model, std::size_t inputs);

}  // namespace bulkhead::worker
