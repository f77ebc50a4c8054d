#pragma once

#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "tests/unit/supervisor/fake_gpus.h"
#include "tests/unit/supervisor/fleet_fixture.h"

namespace bulkhead::supervisor::test {

using namespace std::chrono_literals;

/// A fleet whose memory is planned: 8 GB on GPU-a, 16 GB on GPU-b, and 8 GB of the host.
class PlannedFleet : public FleetFixture {
protected:
    static constexpr std::uint64_t gb = 1'000'000'000;

    static config::ModelSpec on(const std::string& device, const std::string& name,
                                std::optional<std::uint64_t> bytes = {}) {
        auto spec = spec_of(name);
        spec.device = device;
        spec.declared_bytes = bytes;
        spec.min_resident = 0ms;
        return spec;
    }
    void begin(std::vector<config::ModelSpec> models) {
        declared_.limits["cuda:0"];
        declared_.limits["cuda:1"];
        declared_.limits["cpu"].share_bytes = 8 * gb;
        declare(std::move(models));
        bool begun = false;
        fleet_->begin(known_, [&] { begun = true; });
        ASSERT_TRUE(wait([&] { return begun; }));
    }
    /// SIGKILL, and the next one, with what the keeper has.
    void supervise_again(const std::function<void()>& before_it_adopts = [] {}) {
        fleet_.reset();
        context_.gpu_mutexes.clear();
        auto found = keeper_.hand_over();
        begin(declared_.models);
        before_it_adopts();
        std::map<std::string, std::string> declarations;
        for (const auto& spec : declared_.models) declarations[spec.name] = fingerprint(spec);
        fleet_->adopt(std::move(found), declarations, {});
        turn();
    }
    /// All that is ready to be done on the loop.
    void turn() {
        do io_.restart();
        while (io_.poll() > 0);
    }
    /// And off it.
    void settle() {
        for (int i = 0; i < 3; ++i) {
            EXPECT_TRUE(wait([&] { return blocking_.waiting() == 0; }));
            turn();
        }
    }

    Model& model(const std::string& name) { return **fleet_->find(name); }
    Replica& replica(const std::string& name, std::uint32_t index = 0) { return *model(name).replicas[index]; }
    void load(const std::string& name) {
        fleet_->load({&model(name)}, {}, [this](const auto& loaded) {
            if (!loaded) errors_.push_back(loaded.error());
        });
    }
    std::optional<Result<OpenedChannel>>& open(const std::string& name) {
        auto& opened = opened_.emplace_back();
        fleet_->open_channel(
            model(name), {"ana", 7, 0}, {}, [&opened](Result<OpenedChannel> channel) { opened = std::move(channel); },
            &left_);
        return opened;
    }
    FakeWorker& spawned(std::size_t count) {
        EXPECT_TRUE(wait([&] { return keeper_.workers.size() >= count; }));
        return *keeper_.workers.at(count - 1);
    }
    FakeWorker& loading(std::size_t count) {
        FakeWorker& worker = spawned(count);
        worker.hello();
        EXPECT_TRUE(wait([&] { return worker.got("configure"); }));
        return worker;
    }
    /// The driver lists it with so much, or not at all.
    void hold(const FakeWorker& worker, std::uint64_t bytes) {
        const auto gpu = gpu_of(worker);
        if (gpu) held_[worker.pid] = {*gpu, bytes};
        set_machine();
    }
    void give_back(const FakeWorker& worker) {
        held_.erase(worker.pid);
        set_machine();
    }
    void say_ready(FakeWorker& worker, json::object graphs = {}) {
        worker.say({{"type", "ready"}, {"load_ms", 12}, {"torch", "2.11.0"}, {"device", "cpu"}, {"graphs", graphs}});
    }
    FakeWorker& ready(std::size_t count) {
        FakeWorker& worker = loading(count);
        say_ready(worker);
        const Replica& of = replica(worker.name.model, worker.name.replica);
        EXPECT_TRUE(wait([&] { return of.state() == WorkerState::ready; }));
        settle();
        return worker;
    }
    /// Ready, and listed by the driver with so much.
    FakeWorker& resident(std::size_t count, std::uint64_t bytes) {
        hold(spawned(count), bytes);
        return ready(count);
    }
    void answer_drain(FakeWorker& worker) {
        ASSERT_TRUE(wait([&] { return worker.got("drain"); }));
        worker.say({{"type", "drained"}});
        give_back(worker);
        keeper_.exit(worker, {false, 0, true});
    }
    static std::optional<int> gpu_of(const FakeWorker& worker) {
        for (const std::string& one : worker.environment) {
            if (one == "CUDA_VISIBLE_DEVICES=GPU-a") return 0;
            if (one == "CUDA_VISIBLE_DEVICES=GPU-b") return 1;
        }
        return std::nullopt;
    }
    void set_machine(const std::string& more = {}) {
        std::string text = "gpu GPU-a 8000000000 Fake A\ngpu GPU-b 16000000000 Fake B\n" + more;
        for (const auto& [gpu, bytes] : others_)
            text += "process " + std::to_string(gpu) + " 0 " + std::to_string(bytes) + "\n";
        for (const auto& [pid, on] : held_)
            text += "process " + std::to_string(on.first) + " " + std::to_string(pid) + " " +
                    std::to_string(on.second) + " ghost\n";
        machine_.set(text);
    }
    /// Of "cpu", "cuda:0" or "cuda:1".
    std::uint64_t books(const std::string& device, const char* member) {
        for (const json::value& one : fleet_->admission().ledger())
            if (one.at("device").as_string() == device) return one.at(member).to_number<std::uint64_t>();
        return 0;
    }
    /// All but `foreign`.
    json::array ledger() {
        json::array all = fleet_->admission().ledger();
        for (json::value& device : all) device.as_object().erase("foreign");
        return all;
    }
    /// What other programs use of the GPUs, after a look. That of the host is read
    /// from this machine.
    std::vector<std::uint64_t> foreign() {
        fleet_->admission().leave(fleet_->admission().make_room("cuda:0", 0, "game", {}, [](const auto&) {}));
        settle();
        return {books("cuda:0", "foreign"), books("cuda:1", "foreign")};
    }
    /// Answers its new supervisor.
    void answer(FakeWorker& worker, bool configured, bool is_ready, std::uint32_t in_flight) {
        worker.hello_again({{"configured", configured},
                            {"phase", is_ready ? "ready" : "loading"},
                            {"in_flight", in_flight},
                            {"grant", "none"}});
    }
    /// Likewise, one that is ready and idle.
    void be_adopted(FakeWorker& worker) {
        ASSERT_TRUE(wait([&] { return worker.got("hello_asked"); }));
        answer(worker, true, true, 0);
        ASSERT_TRUE(wait([&] { return replica(worker.name.model).state() == WorkerState::ready; }));
    }
    std::string why(const std::string& name) { return fleet_->admission().why(name); }
    json::object outlook(const std::string& name) {
        json::object row;
        fleet_->admission().add_outlook(replica(name), row);
        return row;
    }

    FakeGpus machine_{"gpu GPU-a 8000000000 Fake A\ngpu GPU-b 16000000000 Fake B\n"};
    std::map<pid_t, std::pair<int, std::uint64_t>> held_;
    std::map<int, std::uint64_t> others_;  ///< used by other programs, by GPU
    std::vector<Error> errors_;
    std::list<std::optional<Result<OpenedChannel>>> opened_;
    Fleet::ClientLeft left_;
    Admission::Known known_;  ///< to each supervisor
};

}  // namespace bulkhead::supervisor::test
