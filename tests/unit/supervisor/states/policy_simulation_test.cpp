/// The restart policy and the state machine together, on a virtual clock, through random lives:
/// what must hold in each of them whatever happens when. The expected numbers are a plain model
/// written from the design, not the code's own.

#include <array>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "supervisor/replica/replica_record.h"
#include "supervisor/states/lifecycle.h"
#include "supervisor/states/restart_policy.h"

namespace bulkhead::supervisor {
namespace {

using namespace std::chrono_literals;
using S = WorkerState;
using E = WorkerEvent;
using Time = RestartPolicy::Time;

constexpr std::uint32_t lives = 100'000;
constexpr int steps_per_life = 60;

/// What the design says, as simply as it can be said: crashes that count, readiness that
/// pays for them.
struct Plain {
    struct Crash {
        Millis ready_before;
        bool on_gpu;
        Time at;
    };
    std::vector<Crash> crashes;
    Millis ready_since{};  ///< before crashes that were taken back: readiness all the same

    /// By the second: each second of readiness is credit, 300 of which forgive a crash,
    /// if there is one.
    [[nodiscard]] std::uint32_t unforgiven() const {
        std::uint32_t count = 0;
        Millis credit{};
        const auto ready = [&](Millis duration) {
            while (duration > 0ms && count > 0) {
                const Millis tick = std::min(duration, Millis{1s});
                duration -= tick;
                credit += tick;
                if (credit >= 5min) credit -= 5min, --count;
                if (count == 0) credit = 0ms;
            }
        };
        for (const Crash& crash : crashes) ready(crash.ready_before), ++count;
        ready(ready_since);
        return count;
    }
    void crash(Millis ready_before, bool on_gpu, Time at) {
        crashes.push_back({ready_before + std::exchange(ready_since, {}), on_gpu, at});
    }
    void gpu_failed(Time now) {
        for (; !crashes.empty() && crashes.back().on_gpu && now - crashes.back().at <= 60s; crashes.pop_back())
            ready_since += crashes.back().ready_before;
    }
    [[nodiscard]] static Millis delay_after(std::uint32_t crash) {
        constexpr std::array<Millis, 10> table{0ms, 0ms, 250ms, 500ms, 1s, 2s, 4s, 8s, 16s, 30s};
        return table[std::min<std::size_t>(crash, table.size() - 1)];
    }
};

/// One replica with its policy, as Replica drives them, and a world that does to it what it likes.
class Life {
public:
    explicit Life(std::uint32_t seed) : random_{seed}, restarts_{chance(85)}, policy_{restarts_} {
        if (chance(30)) preload();
    }

    void run() {
        for (int i = 0; i < steps_per_life && wrong_.empty(); ++i) step();
        if (wrong_.empty()) find_the_way_out();
    }
    /// Empty, or what was broken.
    [[nodiscard]] const std::string& wrong() const { return wrong_; }

    struct Counts {
        std::uint64_t spawns = 0, restarts = 0, quarantines = 0, forgiven = 0, by_gpu = 0, refused = 0, waited = 0,
                      adopted = 0, lifted_after = 0;
    };
    Counts counts;

private:
    bool chance(int percent) { return std::uniform_int_distribution{1, 100}(random_) <= percent; }
    Millis some(Millis from, Millis to) {
        return Millis{std::uniform_int_distribution<Millis::rep>{from.count(), to.count()}(random_)};
    }
    void must(bool holds, const char* rule) {
        if (!holds && wrong_.empty())
            wrong_ = std::string{rule} + " in state " + std::string{to_string(state_)} + ", " +
                     std::to_string(plain_.unforgiven()) + " unforgiven crashes";
    }
    void go(E event) {
        const auto to = next(state_, event);
        must(to.has_value(), "an event has no edge");
        if (to) state_ = *to;
    }

    // --- what Replica does

    void preload() {
        policy_.keep_running = true;
        is_preloaded_ = shall_run_ = true;
        load(true);
    }
    void load(bool by_person) {
        if (is_serving(state_)) return;
        if (state_ == S::quarantined && !by_person) return;  // refused
        if (state_ == S::quarantined) lift();
        if (waits_for_gpu() && !by_person) return;  // answered
        awaited_ = true;
        if (state_ == S::stopped || (state_ == S::backoff && by_person)) spawn(false);
    }
    void lift() {
        policy_.lifted();
        plain_ = {};
        if (next(state_, E::lifted)) go(E::lifted);
    }
    void spawn(bool by_itself) {
        must(processes_ == 0, "two workers of one replica");
        if (by_itself) {
            must(now_ >= spawn_not_before_, "a spawn sooner than its delay");
            ++counts.restarts;
        }
        ++counts.spawns;
        ++processes_;
        hopeless_ = failed_ = false;
        ready_for_ = 0ms;
        go(E::spawn_asked);
    }
    void unload() {
        awaited_ = shall_run_ = false;
        policy_.keep_running = false;
        if (state_ == S::backoff) return go(E::stop_asked);
        if (state_ == S::stopped || state_ == S::quarantined) return;
        if (std::exchange(unload_asked_, true)) return;
        if (is_loading(state_)) go(E::stop_asked);
        if (is_serving(state_)) go(E::drain_asked);
    }
    void became_ready() {
        go(E::became_ready);
        policy_.keep_running = true;
        shall_run_ = true;
        awaited_ = false;
    }
    void exit() {
        if (state_ == S::draining) go(E::stop_asked);
        if (is_live(state_)) go(E::lost);
        go(E::exited);
        --processes_;
        // The others were answered.
        if (failed_ || !crash_in_capture_) awaited_ = awaited_ && unload_asked_;
        crash_in_capture_ = false;
    }
    /// The GPU that it needs is quarantined: no process is started, and whoever waited is answered.
    void refuse() {
        ++counts.refused;
        go(E::lost);
        awaited_ = false;
        go(E::exited);
        --processes_;
        refused_ = true;
        reclaimed();
    }
    [[nodiscard]] bool waits_for_gpu() const { return state_ == S::backoff && gpu_awaited_; }
    void reclaimed() {
        const Ending how = unload_asked_ ? Ending::asked
                           : refused_    ? Ending::gpu_refused
                           : hopeless_   ? Ending::hopeless
                           : gpu_fails_  ? Ending::gpu_failed
                           : failed_     ? Ending::load_failed
                                         : Ending::crashed;
        const bool wanted = awaited_ || (shall_run_ && restarts_);
        const bool counts_as_crash = how == Ending::crashed || (how == Ending::load_failed && shall_run_);
        const std::string gpu = on_gpu_ ? "GPU" : "";
        const double jitter = std::uniform_real_distribution{-1.0, 1.0}(random_);
        if (gpu_fails_) gpu_quarantined();
        const auto decision = policy_.ended({how, ready_for_, awaited_, gpu}, now_, jitter);

        const auto before = plain_.unforgiven();
        if (counts_as_crash) plain_.crash(ready_for_, on_gpu_, now_);
        const auto unforgiven = plain_.unforgiven();
        if (counts_as_crash && unforgiven <= before) ++counts.forgiven;
        must(decision.unforgiven == unforgiven,
             "crashes counted otherwise than one, less one per 5 minutes of readiness");
        go(decision.event);
        const bool should_quarantine = how == Ending::hopeless || (counts_as_crash && unforgiven >= 5);
        must((state_ == S::quarantined) == should_quarantine, "quarantine not exactly after a crash loop or exit 78");
        if (state_ == S::quarantined) {
            ++counts.quarantines;
            by_count_ = how != Ending::hopeless;
            quarantine_was_adopted_ = false;
        } else {
            must((state_ == S::backoff) ==
                     (wanted && how != Ending::asked && (how != Ending::load_failed || counts_as_crash)),
                 "a restart that nobody wants, or none that somebody wants");
        }
        gpu_awaited_ = how == Ending::gpu_refused;
        if (gpu_awaited_) must(unforgiven == before, "a refusal by a GPU was counted");
        if (waits_for_gpu()) {
            must(decision.delay == 5s && decision.spawn_at == now_ + 5s,
                 "a wait for a GPU that is not looked at in 5 s");
            backoff_over_ = spawn_not_before_ = decision.spawn_at;
        } else if (state_ == S::backoff) {
            const Millis expected = counts_as_crash ? Plain::delay_after(unforgiven) : Millis{0};
            must(decision.spawn_at == now_ + decision.delay, "a delay that does not count from the end");
            must(decision.delay >= expected * 8 / 10 - 1ms && decision.delay <= expected * 12 / 10,
                 "a delay that is not 0, 0.25, 0.5, 1, 2 … 30 s ±20 %");
            must(decision.delay <= 36s, "a delay beyond 36 s");
            backoff_over_ = decision.spawn_at;
            spawn_not_before_ = now_ + expected * 8 / 10 - 1ms;
        }
        unload_asked_ = gpu_fails_ = refused_ = false;
        if (awaited_ && state_ == S::stopped) spawn(false);
        if (state_ == S::quarantined) awaited_ = false;
    }
    void gpu_quarantined() {
        ++counts.by_gpu;
        plain_.gpu_failed(now_);
        const bool lifts = policy_.gpu_quarantined("GPU", now_);
        if (state_ != S::quarantined) return;
        must(lifts == (by_count_ && plain_.unforgiven() < 5), "a GPU lifts what its crashes had quarantined, no more");
        if (lifts && std::exchange(quarantine_was_adopted_, false)) ++counts.lifted_after;
        if (lifts) go(E::lifted);
        if (lifts && shall_run_ && restarts_) spawn(false);
    }

    /// What the next supervisor knows of it is what stands in its ledger; what runs is not touched.
    void change_supervisor() {
        ++counts.adopted;
        const std::int64_t unix_ms = std::chrono::duration_cast<Millis>(now_.time_since_epoch()).count();
        ReplicaRecord ledger;
        ledger.note(policy_, now_, unix_ms);
        const auto read = ReplicaRecord::parse(ledger.to_text());
        must(read.has_value(), "a ledger that cannot be read");
        policy_ = RestartPolicy{restarts_};
        if (state_ == S::stopped && !is_preloaded_) {  // of these there is no record
            plain_ = {};
            shall_run_ = false;
        } else if (read) {
            read->restore(policy_, now_, unix_ms);
        }
        failed_ = crash_in_capture_ = gpu_awaited_ = false;  // the words were the former one's
        quarantine_was_adopted_ = state_ == S::quarantined;
        const S was = std::exchange(state_, S::stopped);
        if (was == S::stopped) return;
        go(E::found);
        switch (was) {
        case S::spawning:
        case S::loading: return go(E::said_hello);
        case S::capturing: return go(E::said_hello), go(E::capture_began);
        case S::ready: return go(E::became_ready);
        case S::busy: return go(E::became_ready), go(E::became_busy);
        case S::draining: return go(E::became_ready), go(E::drain_asked);
        case S::stopping: return go(E::stop_asked);
        case S::crashed: return go(E::lost);
        case S::reclaiming: return go(unload_asked_ ? E::stop_asked : E::lost), go(E::exited);
        case S::backoff: return go(E::restart_planned);
        case S::quarantined: return go(E::gave_up);
        default: return must(false, "a state in which nothing is found");
        }
    }

    // --- what the world does

    void pass(Millis duration) {
        while (duration > 0ms) {
            if (state_ == S::backoff && backoff_over_ <= now_ + duration) {
                const auto left = std::chrono::duration_cast<Millis>(backoff_over_ - now_);
                now_ = backoff_over_;
                duration -= std::max(left, 0ms);
                if (waits_for_gpu() && gpu_is_quarantined_) {  // looked at in vain
                    backoff_over_ += 5s;
                    continue;
                }
                spawn(true);
            }
            if (is_serving(state_)) ready_for_ += duration;
            now_ += duration;
            duration = 0ms;
        }
    }

    void step() {
        pass(chance(60) ? some(0ms, 2s) : chance(80) ? some(0s, 60s) : some(0s, 20min));
        if (chance(4)) return load(true);
        if (chance(4)) return load(false);
        if (chance(2)) return unload();
        if (chance(1)) return lift_by_restart();
        if (chance(1)) {
            gpu_quarantined();
            return;
        }
        if (chance(1)) change_supervisor();
        if (chance(2)) gpu_is_quarantined_ = true;
        if (gpu_is_quarantined_ && chance(15)) return lift_gpu();
        switch (state_) {
        case S::quarantined:
            if (chance(10)) {
                change_supervisor();
                return gpu_quarantined();
            }
            [[fallthrough]];
        case S::stopped:
            if (chance(50)) load(chance(70));
            return;
        case S::backoff: return;  // time ends it
        case S::spawning:
            if (gpu_is_quarantined_) return refuse();
            return chance(70) ? go(E::said_hello) : crash();
        case S::loading: return chance(40) ? became_ready() : chance(50) ? go(E::capture_began) : crash();
        case S::capturing: return chance(70) ? became_ready() : crash();
        case S::ready: return chance(50) ? go(E::became_busy) : chance(40) ? crash() : void();
        case S::busy: return chance(60) ? go(E::became_idle) : crash();
        case S::draining:
        case S::stopping:
        case S::crashed: return exit();
        case S::reclaiming: return reclaimed();
        case S::adopting: return must(false, "an adoption without an end");
        }
    }
    void crash() {
        on_gpu_ = chance(50);
        failed_ = is_loading(state_) && chance(20);
        hopeless_ = is_loading(state_) && chance(5);
        gpu_fails_ = on_gpu_ && chance(5);
        crash_in_capture_ = state_ == S::capturing;
        if (chance(50)) return go(E::lost);  // seen before the keeper tells
        exit();
    }
    /// A person's word: who waits for the GPU starts at once, whatever its delay was.
    void lift_gpu() {
        gpu_is_quarantined_ = false;
        if (!waits_for_gpu()) return;
        ++counts.waited;
        must(shall_run_ && restarts_, "it waits for a GPU, and nobody wants it");
        spawn(false);
    }
    void lift_by_restart() {
        unload();
        lift();
    }

    /// From wherever it is, a person gets it stopped, and then ready.
    void find_the_way_out() {
        gpu_is_quarantined_ = false;
        unload();
        for (int i = 0; i < 10 && state_ != S::stopped && state_ != S::quarantined; ++i) {
            if (state_ == S::draining || state_ == S::stopping || state_ == S::crashed)
                exit();
            else if (state_ == S::reclaiming)
                reclaimed();
            else
                pass(36s);
            if (is_live(state_) && state_ != S::draining) unload();
        }
        must(state_ == S::stopped || state_ == S::quarantined, "a state without an exit by unload");
        must(processes_ == 0, "a process outlives its unload");
        load(true);
        must(state_ == S::spawning, "a person's load does not start it");
        if (!wrong_.empty()) return;
        go(E::said_hello);
        became_ready();
        must(state_ == S::ready, "it does not become ready");
        if (!wrong_.empty()) return;
        crash_loop();
    }
    /// A model that crashes whenever it is ready ends in quarantine, after the crashes that
    /// are left to it.
    void crash_loop() {
        if (!restarts_) return;
        std::uint32_t crashes = 0;
        while (state_ != S::quarantined && wrong_.empty() && ++crashes <= 5) {
            pass(some(0s, 30s));
            on_gpu_ = false;
            exit();
            reclaimed();
            pass(36s);
            if (state_ != S::spawning) continue;
            go(E::said_hello);
            became_ready();
        }
        must(state_ == S::quarantined, "a crash loop that is not quarantined");
    }

    std::mt19937 random_;
    const bool restarts_;
    RestartPolicy policy_;
    Plain plain_;
    S state_ = S::stopped;
    Time now_{1h};
    Time backoff_over_{}, spawn_not_before_{};
    int processes_ = 0;
    Millis ready_for_{};
    bool shall_run_ = false, awaited_ = false, unload_asked_ = false;
    bool hopeless_ = false, failed_ = false, gpu_fails_ = false, on_gpu_ = false, crash_in_capture_ = false;
    bool by_count_ = false, is_preloaded_ = false, quarantine_was_adopted_ = false;
    bool gpu_is_quarantined_ = false, gpu_awaited_ = false, refused_ = false;
    std::string wrong_;
};

TEST(PolicySimulation, AHundredThousandRandomLivesBreakNoRule) {
    Life::Counts all;
    for (std::uint32_t seed = 0; seed < lives; ++seed) {
        Life life{seed};
        life.run();
        ASSERT_EQ(life.wrong(), "") << "seed " << seed;
        all.spawns += life.counts.spawns;
        all.restarts += life.counts.restarts;
        all.quarantines += life.counts.quarantines;
        all.forgiven += life.counts.forgiven;
        all.by_gpu += life.counts.by_gpu;
        all.refused += life.counts.refused;
        all.waited += life.counts.waited;
        all.adopted += life.counts.adopted;
        all.lifted_after += life.counts.lifted_after;
    }
    // Lives in which nothing happens prove nothing.
    EXPECT_GT(all.spawns, lives * 5ULL);
    EXPECT_GT(all.restarts, lives * 1ULL);
    EXPECT_GT(all.quarantines, lives / 2ULL);
    EXPECT_GT(all.forgiven, lives / 4ULL);
    EXPECT_GT(all.by_gpu, lives / 4ULL);
    EXPECT_GT(all.refused, lives / 4ULL);
    EXPECT_GT(all.waited, lives / 20ULL);
    EXPECT_GT(all.adopted, lives / 4ULL);
    EXPECT_GT(all.lifted_after, lives / 100ULL);
    RecordProperty("spawns", std::to_string(all.spawns));
    RecordProperty("restarts", std::to_string(all.restarts));
    RecordProperty("quarantines", std::to_string(all.quarantines));
}

}  // namespace
}  // namespace bulkhead::supervisor
