#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ipc/base/error.h"
#include "supervisor/gpu/nvml_functions.h"

namespace bulkhead::supervisor {

struct GpuProcess {
    std::int64_t pid = 0;
    std::optional<std::uint64_t> bytes;  ///< empty if the driver does not report it
};

/// What a GPU reports beside its memory; empty if the driver does not report it.
struct GpuSensors {
    std::optional<unsigned> clock_mhz;  ///< of the multiprocessors
    std::optional<unsigned> power_mw;
    std::optional<unsigned> temperature_c;
    std::optional<unsigned> utilization_percent;  ///< of the time since the driver's last sample
    std::vector<std::string_view> throttled;      ///< what holds its clock down now
};

struct Gpu {
    unsigned index = 0;
    std::string uuid;                          ///< "GPU-…"; empty for a GPU that never answered
    std::string name;                          ///< escaped
    std::string trouble;                       ///< "lost: GPU is lost"; empty while it answers
    bool lost = false;                         ///< permanently: fallen off the bus
    std::optional<std::uint64_t> total_bytes;  ///< empty if not reported, or the GPU
                                               ///< does not answer
    std::optional<std::uint64_t> free_bytes;
    bool processes_known = false;
    std::vector<GpuProcess> processes;  ///< compute and graphics, each process once
    GpuSensors sensors{};

    /// Finds a listed process, with or without a memory figure.
    [[nodiscard]] const GpuProcess* find(std::int64_t pid) const;
    /// Used memory that no listed process accounts for: the driver's own, and memory of dead
    /// processes that is not freed yet. Empty unless the driver reports all figures.
    [[nodiscard]] std::optional<std::uint64_t> unattributed_bytes() const;
};

/// A critical error that the driver reported about a GPU.
struct Xid {
    std::string uuid;
    std::uint64_t number = 0;
    /// Returns the meaning of well-known numbers, else "see NVIDIA's list of Xid errors".
    [[nodiscard]] std::string_view meaning() const;
};

/// The driver's management library, loaded at run time. It creates no CUDA context, so it costs no
/// device memory and survives whatever a worker does to its device.
///
/// Thread  any, one at a time; calls may block as long as the driver does, so `Gpus` calls it on a
///         thread of its own
class Nvml {
public:
    /// `$BULKHEAD_NVML`, else libnvidia-ml.so.1.
    static Result<std::unique_ptr<Nvml>> open();
    ~Nvml();
    Nvml(const Nvml&) = delete;
    Nvml& operator=(const Nvml&) = delete;

    /// Returns every GPU with its present memory and processes. A GPU that does not answer has
    /// `trouble` set, with its last known name and UUID.
    /// Errors  resources_exhausted: the driver does not answer; the text is its own
    [[nodiscard]] Result<std::vector<Gpu>> gpus();

    /// Returns the errors since the last call, at most `gpu_events_per_read`; never waits. Watches
    /// GPUs from the first call of `gpus` on.
    [[nodiscard]] std::vector<Xid> take_xids();

private:
    struct Known {
        unsigned index = 0;
        std::string name;
    };
    Nvml(void* library, const nvml::Functions& functions) : library_{library}, functions_{functions} {}
    [[nodiscard]] int start();
    void stop();
    [[nodiscard]] Result<unsigned> count();
    [[nodiscard]] Gpu read(unsigned index);
    void name_the_lost(std::vector<Gpu>& gpus);
    [[nodiscard]] int read_memory(void* device, Gpu& gpu) const;
    [[nodiscard]] int read_processes(void* device, Gpu& gpu) const;
    [[nodiscard]] GpuSensors read_sensors(void* device) const;
    void watch(void* device, const std::string& uuid);

    void* library_;
    nvml::Functions functions_;
    bool started_ = false;
    bool in_trouble_ = false;  ///< at the last reading: only a restart of the library
                               ///< sees a recovery
    std::chrono::steady_clock::time_point started_at_{};
    std::map<std::string, Known> known_;    ///< by UUID: every GPU that has ever answered
    void* events_ = nullptr;                ///< the library's event set
    std::map<void*, std::string> watched_;  ///< UUIDs by device handle
};

}  // namespace bulkhead::supervisor
