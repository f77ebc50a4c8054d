// gpu_slab_bench [--rehearse]: what a tensor on the GPU costs between two processes. How long work
// takes from one process' stream to the other's, how often a request's tensors are copied, and how
// long it is under way, by slabs of both kinds and, for comparison, through host memory.
//
// The fake driver (tests/fakes/fake_cuda) goes the same way with the same checks, by --rehearse
// alone: it prints what was counted and no time, for there time means nothing. Exit status 77:
// there is no GPU.

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bulkhead/channel.h"
#include "ipc/cuda/interprocess_event.h"
#include "ipc/cuda/vmm_slab.h"
#include "tests/bench/record.h"
#include "tests/gpu/models.h"
#include "tests/gpu/slabs/cuda_peer.h"
#include "tests/gpu/slabs/gpu_echo_daemon.h"

namespace bulkhead::bench {
namespace {

using test::CudaPeer;
using test::Daemon;
using test::StreamGate;
using test::Stamp;

template <typename T>
T must(Result<T> result) {
    if (!result) throw std::runtime_error{result.error().text()};
    if constexpr (!std::is_void_v<T>) return std::move(*result);
}

std::string must_be_ok(const std::string& answer) {
    if (!answer.starts_with("ok")) throw std::runtime_error{answer};
    return answer.size() > 3 ? answer.substr(3) : std::string{};
}

/// GPU 0 and one stream of this process.
class Device {
public:
    explicit Device(std::shared_ptr<const cuda::Gpu> of) : gpu{std::move(of)}, stream{make_stream()} {}
    [[nodiscard]] cuda::CUstream make_stream() const {
        cuda::CUstream made = nullptr;
        call("cuStreamCreate", &cuda::Driver::cuStreamCreate, &made, cuda::CU_STREAM_NON_BLOCKING);
        return made;
    }
    void copy(void* to, const void* from, std::size_t bytes) const {
        call("cuMemcpyAsync", &cuda::Driver::cuMemcpyAsync, reinterpret_cast<cuda::CUdeviceptr>(to),
             reinterpret_cast<cuda::CUdeviceptr>(from), bytes, stream);
    }
    void call_back(cuda::CUstream on, cuda::CUhostFn function, void* data) const {
        call("cuLaunchHostFunc", &cuda::Driver::cuLaunchHostFunc, on, function, data);
    }
    void synchronize(cuda::CUstream which) const {
        call("cuStreamSynchronize", &cuda::Driver::cuStreamSynchronize, which);
    }

    std::shared_ptr<const cuda::Gpu> gpu;
    cuda::CUstream stream;

private:
    template <typename Function, typename... Arguments>
    void call(std::string_view name, Function function, Arguments... arguments) const {
        const cuda::Gpu::Current current{*gpu};
        must(gpu->driver().check(name, (gpu->driver().*function)(arguments...)));
    }
};

/// Microseconds from the end of one stream's work to the begin of that of another, which waits for
/// it by an interprocess event, as host functions at both places see it.
class HandOver {
public:
    explicit HandOver(const Device& device)
        : device_{device}, neighbour_{device.make_stream()}, event_{must(cuda::InterprocessEvent::create(device.gpu))} {
        must_be_ok(peer_.ask("event import " + test::to_text(must(event_.handle()))));
    }

    double to_another_process() {
        return measure(
            [&] {
                const std::string waits = peer_.ask("event wait");
                return waits == "ok" ? peer_.ask("stream stamp") : waits;
            },
            [&] { return std::stoll(must_be_ok(peer_.ask("stream stamped"))); });
    }
    double within_this_process() {
        Stamp begun;
        return measure(
            [&]() -> std::string {
                const Result<> waits = event_.make_wait(neighbour_);
                if (!waits) return waits.error().text();
                device_.call_back(neighbour_, Stamp::take, &begun);
                return "ok";
            },
            [&] {
                device_.synchronize(neighbour_);
                return static_cast<long long>(begun.ns);
            });
    }

private:
    template <typename Queue, typename Begun>
    double measure(Queue queue, Begun begun) {
        StreamGate gate;
        Stamp ended;
        must(device_.gpu->driver().check("cuLaunchHostFunc", gate.hold(*device_.gpu, device_.stream)));
        device_.call_back(device_.stream, Stamp::take, &ended);
        const Result<> recorded = event_.record(device_.stream);
        const std::string queued = queue();
        gate.let_pass();  // whatever went wrong: the stream still stands at it
        device_.synchronize(device_.stream);
        must(recorded);
        must_be_ok(queued);
        return static_cast<double>(begun() - ended.ns) / 1000;
    }

    const Device& device_;
    cuda::CUstream neighbour_;
    cuda::InterprocessEvent event_;
    CudaPeer peer_;
};

/// A tensor in this process' GPU memory goes to an echoing worker, and its result is there for
/// this process' GPU.
class Way {
public:
    virtual ~Way() = default;
    virtual void round_trip() = 0;
    [[nodiscard]] virtual const void* result() const = 0;      ///< of the last one, on the GPU
    [[nodiscard]] virtual double copies_here() const = 0;  ///< of each, by this process
};

std::array<std::int64_t, 1> dims_of(std::uint64_t bytes) { return {static_cast<std::int64_t>(bytes / sizeof(float))}; }

class BySlab final : public Way {
public:
    BySlab(const Device& device, const Daemon& daemon, const std::string& model, wire::SlabKind kind,
           const std::vector<float>& data)
        : device_{device}, channel_{open(device, daemon, model, kind)},
          input_{must(channel_.allocate_on_gpu(wire::DType::float32, dims_of(data.size() * sizeof(float))))} {
        must(channel_.keep_outputs_on_gpu(data.size() * sizeof(float)));
        if (const auto why = channel_.why_no_gpu()) throw std::runtime_error{why->text()};
        device_.copy(input_.bytes().data(), data.data(), input_.bytes().size());
    }
    void round_trip() override {
        const NamedInput named{"x", &input_};
        Request request;
        request.inputs = {&named, 1};
        request.stream = device_.stream;
        reply_.reset();
        reply_.emplace(must(channel_.infer(request)));
        if (!reply_->outputs.at(0).gpu()) throw std::runtime_error{"a result that should lie on the GPU does not"};
        must(reply_->outputs.at(0).read_on(device_.stream));
        device_.synchronize(device_.stream);
    }
    [[nodiscard]] const void* result() const override { return reply_->outputs.at(0).bytes().data(); }
    [[nodiscard]] double copies_here() const override { return 0; }

private:
    static Channel open(const Device& device, const Daemon& daemon, const std::string& model, wire::SlabKind kind) {
        ControlClient control = daemon.connect();
        ChannelOptions options;
        options.gpu = device.gpu;
        options.gpu_kind = kind;
        return must(Channel::open(control, model, options));
    }
    const Device& device_;
    Channel channel_;
    Input input_;
    std::optional<Reply> reply_;
};

/// What is left to do where no GPU memory is shared. The worker registers these slabs with CUDA,
/// this process does not.
class ByHost final : public Way {
public:
    ByHost(const Device& device, const Daemon& daemon, const std::string& model, const std::vector<float>& data)
        : device_{device}, channel_{must(daemon.open(model))},
          input_{must(channel_.allocate(wire::DType::float32, dims_of(data.size() * sizeof(float))))},
          source_{must(cuda::VmmSlab::create(device.gpu, input_.bytes().size()))},
          target_{must(cuda::VmmSlab::create(device.gpu, input_.bytes().size()))} {
        device_.copy(at(source_), data.data(), input_.bytes().size());
    }
    void round_trip() override {
        device_.copy(input_.bytes().data(), at(source_), input_.bytes().size());
        device_.synchronize(device_.stream);
        const NamedInput named{"x", &input_};
        Request request;
        request.inputs = {&named, 1};
        const Reply reply = must(channel_.infer(request));
        const auto bytes = reply.outputs.at(0).bytes();
        device_.copy(at(target_), bytes.data(), bytes.size());
        device_.synchronize(device_.stream);
    }
    [[nodiscard]] const void* result() const override { return at(target_); }
    [[nodiscard]] double copies_here() const override { return 2; }

private:
    static void* at(const cuda::VmmSlab& slab) { return reinterpret_cast<void*>(slab.pointer()); }
    const Device& device_;
    Channel channel_;
    Input input_;
    cuda::VmmSlab source_;
    cuda::VmmSlab target_;
};

/// One that gives its input back, and how many tensors it copied meanwhile, by its own counters.
struct Worker {
    std::string name;
    std::string model;
    std::string fleet;
    test::SpawnOptions options;

    static std::uint64_t requests(const boost::json::object& row) {
        return row.at("requests").to_number<std::uint64_t>();
    }
    [[nodiscard]] double copies(const Daemon& daemon, std::uint64_t requests_done) const {
        const auto counted = [&](const boost::json::object& row) { return requests(row) >= requests_done; };
        if (!daemon.wait_until(model, counted)) throw std::runtime_error{"the worker's counters do not move"};
        double sum = 0;
        const boost::json::object row = daemon.row(model);
        for (const auto& [direction, count] : row.at("graphs").at("copies").as_object())
            sum += count.to_number<double>();
        return sum;
    }
};

struct Plan {
    int rounds;
    std::vector<std::uint64_t> sizes;  ///< a real model's graphs are captured for these
};
constexpr std::uint64_t KiB = 1024, MiB = 1024 * KiB;
const Plan measured{15, {4 * KiB, 128 * MiB}}, rehearsed{1, {4 * KiB, 1 * MiB}};

std::string size_text(std::uint64_t bytes) {
    return bytes >= MiB ? fmt::format("{} MiB", bytes / MiB) : fmt::format("{} KiB", bytes / KiB);
}

struct Contestant {
    std::string name;
    std::unique_ptr<Way> way;
    std::vector<double> times_us{};
    double copies = 0;
};

/// The same tensor in turns on each way; the last one is what the others are held against.
void compare(const Device& device, const Daemon& daemon, const Worker& worker, std::uint64_t bytes, const Plan& plan,
             Records& records) {
    std::vector<float> data(bytes / sizeof(float));
    std::iota(data.begin(), data.end(), 1.0F);
    const auto by_slab = [&](wire::SlabKind kind) {
        return std::make_unique<BySlab>(device, daemon, worker.model, kind, data);
    };
    std::vector<Contestant> contestants;
    contestants.push_back({"VMM slabs", by_slab(wire::SlabKind::cuda_vmm)});
    contestants.push_back({"legacy slabs", by_slab(wire::SlabKind::cuda_ipc)});
    contestants.push_back(
        {"host slabs", std::make_unique<ByHost>(device, daemon, worker.model, data)});

    std::uint64_t done = Worker::requests(daemon.row(worker.model));
    for (Contestant& one : contestants) {
        constexpr int trips = 4;
        const double before = worker.copies(daemon, done);
        for (int i = 0; i < trips; ++i) one.way->round_trip();
        one.copies = (worker.copies(daemon, done += trips) - before) / trips + one.way->copies_here();
        std::vector<float> seen(data.size());
        device.copy(seen.data(), one.way->result(), bytes);
        device.synchronize(device.stream);
        if (seen != data) throw std::runtime_error{one.name + ": the result is not what was sent"};
    }
    const int trips = bytes > MiB ? 3 : 50;
    for (int round = 0; round < plan.rounds; ++round)
        for (Contestant& one : contestants)
            for (int i = 0; i < trips; ++i) one.times_us.push_back(microseconds([&] { one.way->round_trip(); }));

    const Contestant& host = contestants.back();
    const double host_us = median(host.times_us);
    for (const Contestant& one : contestants) {
        const std::string name = fmt::format("{}, {}, {}", worker.name, size_text(bytes), one.name);
        const std::string baseline = &one == &host ? "" : host.name;
        records.push_back({name, one.copies, "copies", baseline, host.copies});
        records.push_back({name, median(one.times_us), "us", baseline, host_us});
    }
}

Records run(const Device& device, const Plan& plan) {
    Records records;
    {
        HandOver hand_over{device};
        std::vector<double> there, here;
        for (int i = 0; i < 20 * plan.rounds; ++i) {
            there.push_back(hand_over.to_another_process());
            here.push_back(hand_over.within_this_process());
        }
        records.push_back({"hand-over to another process' stream", median(there), "us", "to one of its own",
                           median(here)});
    }
    const test::GpuEchoDaemon echo{*device.gpu};
    const std::string room = "channel: {max: 2GiB}\n";
    std::vector<Worker> workers{
        {"copying worker", "m",
         echo.fleet_of("m", "inputs: {x: {dtype: float32, shape: [1..33554432]}}\nwarmup: {x: [4]}\n"
                            "outputs: {y: {dtype: float32, shape: [1..33554432]}}\n" +
                                room),
         echo.options}};
    const bool has_models = std::filesystem::exists(test::gpu_model_folder() + "/echo.pt");
    if (!test::is_fake_cuda() && has_models)
        workers.push_back({"graph of a model", "echo", test::gpu_fleet("echo", "graphs: required\n" + room), {}});
    else
        std::printf("  left out: a model under a CUDA Graph, for there is %s\n",
                    has_models ? "no GPU" : "no tests/gpu/make_models.py's echo.pt in the build");
    for (const Worker& worker : workers) {
        const Daemon daemon{worker.fleet, worker.options};
        (void)must(daemon.load(worker.model));
        for (const std::uint64_t bytes : plan.sizes) compare(device, daemon, worker, bytes, plan, records);
    }
    return records;
}

int run_bench(bool rehearses) {
    if (test::is_fake_cuda() != rehearses) {
        std::fprintf(stderr, rehearses ? "--rehearse is for the fake driver: set BULKHEAD_LIBCUDA\n"
                                       : "the times of a fake driver mean nothing: --rehearse prints none\n");
        return 2;
    }
    auto gpu = cuda::Gpu::open(0);
    if (!gpu) return std::printf("skipped: %s\n", gpu.error().text().c_str()), 77;
    if (((*gpu)->features() & wire::feature_cuda_vmm) == 0)
        return std::printf("skipped: this GPU shares no memory by descriptor\n"), 77;
    std::printf("gpu-slabs: a tensor on the GPU between two processes%s\n",
                rehearses ? "; rehearsed on the fake driver, which proves nothing of a GPU" : "");
    Records records = run(Device{*gpu}, rehearses ? rehearsed : measured);
    if (rehearses) std::erase_if(records, [](const Record& one) { return one.unit == "us"; });
    print(records);
    return 0;
}

}  // namespace
}  // namespace bulkhead::bench

int main(int argc, char** argv) {
    const std::string_view option = argc == 2 ? argv[1] : "";
    if (option == "--cuda-peer") return bulkhead::test::CudaPeer::run();
    if (argc > 1 && option != "--rehearse") return std::fprintf(stderr, "usage: %s [--rehearse]\n", argv[0]), 2;
    try {
        return bulkhead::bench::run_bench(option == "--rehearse");
    } catch (const std::exception& failed) {
        return std::fprintf(stderr, "error: %s\n", failed.what()), 1;
    }
}
