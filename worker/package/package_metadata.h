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

    /// Empty if the metadata lacks it.
    [[nodiscard]] std::string fact(const std::string& key) const;
};

/// The machine that a package must fit.
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

/// Checks before the library is loaded: code for another CPU dies of SIGILL, and code for another
/// device fails in unclear ways. Facts missing from the metadata are not checked.
/// Errors  package_incompatible naming both sides, and how to export again
[[nodiscard]] Result<> check_compatible(const CompiledModel& model, const Machine& machine);

/// Whether the model may write to one of its first `inputs` arguments. The exporter declares it
/// (BULKHEAD_MUTATED_ARGUMENTS: positions, or `none`); without that, it may.
/// BULKHEAD_WRITTEN_ARGUMENTS of older exporters said `none` for every package and is ignored.
[[nodiscard]] bool may_write_inputs(const CompiledModel& model, std::size_t inputs);

}  // namespace bulkhead::worker
