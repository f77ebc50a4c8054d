#pragma once

#include <chrono>
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
#include "supervisor/fleet/context_start.h"
#include "supervisor/memory/declaration.h"
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// Processes that were started before anybody asked for their model: `blanks` of the fleet for each device and each way
/// in which models there are started. A load takes one instead of a new process, and another is started in its place.
///
/// What a blank needs to be told comes with `configure`. Until then nothing reads its link or its output: what it said
/// waits there for its model.
///
/// A blank on a GPU makes its context before it says hello. It has the GPU's turn from before its start until the
/// driver was asked what it holds, and its end has a turn of its own: a load waits for it as for another load. A blank
/// without a context yet is not taken. The keeper has a record of it that names its GPU; the next supervisor ends all blanks that
/// it finds.
///
/// Thread  the loop
class Blanks {
public:
    explicit Blanks(FleetContext& context);
    ~Blanks();
    Blanks(const Blanks&) = delete;
    Blanks& operator=(const Blanks&) = delete;

    /// The name of all blanks; no model can have it.
    static constexpr const char* model = "_blank";

    /// GPUs that a model may use.
    using GpusOf = std::function<std::vector<Device>(const config::ModelSpec& spec)>;
    /// Once. `fleet` outlives this.
    void begin(const config::Fleet& fleet, const GpusOf& gpus_of);
    [[nodiscard]] bool are_wanted() const noexcept { return are_wanted_; }
    /// Ends all, and starts none any more; `ended` when nothing of them is left.
    void stop(std::function<void()> ended);

    /// So many bytes of a device are free for them: if they have more, some end at once. Until the first call they may
    /// use any of the host, and nothing of a GPU.
    void fit(const memory::DeviceId& device, std::int64_t bytes);
    /// `gone` when the memory of all that were ended is back; at once where none was.
    void when_gone(std::function<void()> gone);
    /// Reads their memory on the host; off the loop.
    void sample();
    [[nodiscard]] std::vector<pid_t> pids() const;
    /// Anonymous and shared memory of processes.
    /// Thread  any
    [[nodiscard]] static std::map<pid_t, std::uint64_t> read_memory(const std::vector<pid_t>& pids);
    /// `gpus`  empty: they were not asked
    void measured(const std::map<pid_t, std::uint64_t>& on_host, const std::vector<Gpu>& gpus);
    /// That those that wait have by the last sample.
    [[nodiscard]] std::uint64_t bytes(const memory::DeviceId& device) const;
    /// Members `wanted`, `waiting`, `ready`, `pids`, `host_bytes` and `gpu_bytes`.
    [[nodiscard]] boost::json::object status() const;

private:
    /// One way to start a process.
    struct Kind {
        const config::ModelSpec* spec = nullptr;  ///< a model that is started so
        Device device{};
        std::size_t wanted = 0;
        StartConditions conditions{};
        std::size_t starting = 0;         ///< asked of the keeper; on a GPU it may wait for its turn
        std::uint64_t bytes_at_most = 0;  ///< that one of them was seen to have on the host
        std::uint64_t context_bytes = limits::blank_context_bytes;  ///< likewise on its GPU, once one was seen
        std::unique_ptr<ContextStart> context{};  ///< on a GPU, of the one that is being started
    };
    struct Waiting {
        Kind* kind;
        WorkerName name;
        bool has_cgroup;
        SpawnedProcess process;
        Deadline::Clock::time_point started_at;
        bool has_context;  ///< or needs none
        std::uint64_t bytes = 0;
        std::uint64_t gpu_bytes = 0;  ///< as the kind's `context_bytes` while it makes its context
        std::string oom_score{};      ///< that it had before the kernel was told to end it first
    };

    void add_kind(const config::ModelSpec& spec, const Device& device, std::size_t wanted);
    [[nodiscard]] std::optional<Blank> take(const SpawnRequest& request);
    void refill();
    void refill_after(Deadline::Clock::duration pause);
    [[nodiscard]] std::size_t count() const;  ///< that wait or are being started
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
    bool refill_is_due_ = false;
    Deadline::Clock::time_point not_before_{};  ///< after one that could not be started, or died
    int failures_ = 0;                          ///< of those, since one was taken or made its context
    std::size_t ending_ = 0;
    bool stopping_ = false;
    std::vector<std::function<void()>> stop_waiters_;
    std::vector<std::function<void()>> gone_waiters_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace bulkhead::supervisor
