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
#include "supervisor/replica/fleet_context.h"

namespace bulkhead::supervisor {

/// Processes that were started before anybody asked for their model: `blanks` of the fleet for each way in which its
/// models on the CPU are started. A load takes one instead of a new process, and another is started in its place.
///
/// What a blank needs to be told comes with `configure`. Until then nothing reads its link or its output: what it said
/// waits there for its model. A blank has no record with the keeper, so the next supervisor ends those that it finds.
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

    /// Once. `fleet` outlives this.
    void begin(const config::Fleet& fleet);
    [[nodiscard]] bool are_wanted() const noexcept { return wanted_ > 0; }
    /// Ends all, and starts none any more; `ended` when nothing of them is left.
    void stop(std::function<void()> ended);

    /// So many bytes of the host are free for them: if they have more, some end at once. Until the first call they may
    /// use any.
    void fit(std::int64_t bytes);
    /// Reads their memory; off the loop.
    void sample();
    [[nodiscard]] std::vector<pid_t> pids() const;
    /// Anonymous and shared memory of processes.
    /// Thread  any
    [[nodiscard]] static std::map<pid_t, std::uint64_t> read_memory(const std::vector<pid_t>& pids);
    void measured(const std::map<pid_t, std::uint64_t>& bytes);
    /// That they have by the last sample.
    [[nodiscard]] std::uint64_t bytes() const;
    /// Members `wanted`, `waiting`, `ready`, `pids` and `host_bytes`.
    [[nodiscard]] boost::json::object status() const;

private:
    /// One way to start a process.
    struct Kind {
        const config::ModelSpec* spec;  ///< a model that is started so
        StartConditions conditions;
        std::size_t starting = 0;         ///< asked of the keeper
        std::uint64_t bytes_at_most = 0;  ///< that one of them was seen to have
    };
    struct Waiting {
        Kind* kind;
        WorkerName name;
        bool has_cgroup;
        SpawnedProcess process;
        Deadline::Clock::time_point started_at;
        std::uint64_t bytes = 0;
        std::string oom_score;  ///< that it had before the kernel was told to end it first
    };

    void add_kind(const config::ModelSpec& spec);
    [[nodiscard]] std::optional<Blank> take(const SpawnRequest& request);
    void refill();
    void refill_after(Deadline::Clock::duration pause);
    [[nodiscard]] std::size_t count() const;  ///< that wait or are being started
    [[nodiscard]] std::size_t missing(const Kind& kind) const;
    [[nodiscard]] bool has_room_for(const Kind& kind) const;
    void start(Kind& kind);
    void on_spawned(Kind& kind, const WorkerName& name, bool has_cgroup, Result<SpawnedProcess> spawned);
    void on_exited(const WorkerName& name, const ProcessExit& exit);
    void end(std::list<Waiting>::iterator blank, const std::string& why, std::optional<ProcessExit> exit = {});
    void one_has_ended();

    FleetContext& context_;
    std::size_t wanted_ = 0;  ///< of each kind
    std::list<Kind> kinds_;
    std::list<Waiting> waiting_;
    std::optional<std::int64_t> room_;
    Deadline refill_;
    bool refill_is_due_ = false;
    Deadline::Clock::time_point not_before_{};  ///< after one that could not be started, or died
    std::size_t ending_ = 0;
    bool stopping_ = false;
    std::vector<std::function<void()>> stop_waiters_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

}  // namespace bulkhead::supervisor
