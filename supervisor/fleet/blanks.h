#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "config/fleet.h"
#include "supervisor/base/deadline.h"
#include "supervisor/memory/declaration.h"
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

class ContextStart;

/// Returns a process' memory on the GPU; empty if the driver does not report it.
[[nodiscard]] std::optional<std::uint64_t> bytes_of_process(const Gpu& gpu, pid_t pid);

/// Processes started before a load asks for their model: the fleet's `blanks` for each device and
/// each way in which models start there. A load takes a blank instead of starting a process, and
/// another blank is started in its place.
///
/// A blank learns its model from `configure`. Until then the supervisor does not read its link
/// or its output.
///
/// A blank on a GPU creates its context before it says hello. It holds the GPU's lock from before
/// its start until the driver has reported its memory; its end takes the lock too. So a load waits
/// for it as for another load. A blank without a context is not taken. The keeper's record of a
/// blank names its GPU; the next supervisor ends all blanks that it finds.
///
/// Thread  the loop
class Blanks {
public:
    explicit Blanks(FleetContext& context);
    ~Blanks();
    Blanks(const Blanks&) = delete;
    Blanks& operator=(const Blanks&) = delete;

    /// Model name of all blanks; no model can have it.
    static constexpr const char* model = "_blank";

    /// Returns the GPUs that a model may use.
    using GpusOf = std::function<std::vector<Device>(const config::ModelSpec& spec)>;
    /// Call again when models may use further GPUs. `fleet` outlives this.
    void begin(const config::Fleet& fleet, const GpusOf& gpus_of);
    [[nodiscard]] bool are_wanted() const noexcept { return are_wanted_; }
    /// Ends all blanks and starts no more; calls `ended` when all are gone.
    void stop(std::function<void()> ended);

    /// Lets the blanks use `bytes` of a device; ends some at once if they hold more. Before the
    /// first call they may use host memory without limit and no GPU memory.
    void fit(const memory::DeviceId& device, std::int64_t bytes);
    /// Calls `gone` when the memory of all ended blanks is back; at once if none is ending.
    void when_gone(std::function<void()> gone);
    /// Reads the host memory of all blanks, off the loop.
    void sample();
    [[nodiscard]] std::vector<pid_t> pids() const;
    /// Returns the anonymous and shared memory of processes, in bytes.
    /// Thread  any
    [[nodiscard]] static std::map<pid_t, std::uint64_t> read_memory(const std::vector<pid_t>& pids);
    /// `gpus`  empty: the driver was not asked
    void measured(const std::map<pid_t, std::uint64_t>& on_host, const std::vector<Gpu>& gpus);
    /// Bytes that the waiting blanks hold, by the last sample.
    [[nodiscard]] std::uint64_t bytes(const memory::DeviceId& device) const;
    /// Members `wanted`, `waiting`, `ready`, `pids`, `host_bytes` and `gpu_bytes`.
    [[nodiscard]] boost::json::object status() const;

private:
    /// One way to start a process, with what is known of its blanks.
    struct Kind {
        const config::ModelSpec* spec = nullptr;  ///< a model that starts this way
        Device device{};
        std::size_t wanted = 0;
        StartConditions conditions{};
        std::size_t starting = 0;         ///< start requested; on a GPU it may wait for the lock
        std::uint64_t bytes_at_most = 0;  ///< most host memory seen of one blank
        /// Of one on its GPU; assumed until measured.
        std::uint64_t context_bytes = limits::blank_context_bytes;
        std::unique_ptr<ContextStart> context{};  ///< of the blank being started on a GPU
    };
    struct Waiting {
        Kind* kind;
        WorkerName name;
        bool has_cgroup;
        SpawnedProcess process;
        Deadline::Clock::time_point started_at;
        bool has_context;  ///< true on a CPU
        std::uint64_t bytes = 0;
        std::uint64_t gpu_bytes = 0;  ///< the kind's `context_bytes` while it creates its context
        std::string oom_score{};      ///< former oom_score_adj, restored when the blank is taken
    };

    void add_kind(const config::ModelSpec& spec, const Device& device, std::size_t wanted);
    [[nodiscard]] std::optional<Blank> take(const SpawnRequest& request);
    void refill();
    void refill_after(Deadline::Clock::duration pause);
    [[nodiscard]] std::size_t count() const;  ///< waiting or being started
    [[nodiscard]] std::size_t missing(const Kind& kind) const;
    [[nodiscard]] std::uint64_t planned(const memory::DeviceId& device) const;
    [[nodiscard]] bool has_room_for(const Kind& kind) const;
    void start(Kind& kind);
    void spawn(Kind& kind);
    void on_spawned(Kind& kind, const WorkerName& name, bool has_cgroup, Result<SpawnedProcess> spawned);
    void on_context(Kind& kind, const WorkerName& name, const Result<std::optional<std::uint64_t>>& bytes);
    void on_exited(const WorkerName& name, const ProcessExit& exit);
    void end_surplus(const memory::DeviceId& device);
    void end(std::list<Waiting>::iterator blank, const std::string& why, std::optional<ProcessExit> exit = {});
    void one_has_ended();
    void one_has_failed();

    FleetContext& context_;
    bool are_wanted_ = false;
    std::list<Kind> kinds_;
    std::list<Waiting> waiting_;
    std::map<memory::DeviceId, std::int64_t> room_;
    Deadline refill_;
    Deadline::Clock::time_point not_before_{};  ///< pause after a blank failed to start or died
    int failures_ = 0;                          ///< such failures since a blank was last taken or
                                                ///< created its context
    std::size_t ending_ = 0;
    bool stopping_ = false;
    std::vector<std::function<void()>> stop_waiters_;
    std::vector<std::function<void()>> gone_waiters_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace bulkhead::supervisor
