// The channel from each client, at four sizes, for one client and for many, beside what else
// carries a tensor between two processes of a machine. Everything that is compared is measured in
// turns within one run.

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>

#include "ipc/base/machine_memory.h"
#include "tests/bench/baselines.h"
#include "tests/bench/crowd.h"
#include "tests/bench/peers/peer.h"
#include "tests/bench/placement.h"
#include "tests/bench/record.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"

namespace bulkhead::bench::channel_bench {
namespace {

constexpr int rounds = 5;
constexpr int size_rounds = 10;

/// One table, printed as it comes to be.
class Table {
public:
    void heading(const Exchange& exchange) {
        exchange_ = exchange;
        std::printf("\n  %-38s %10s %10s %10s %11s %10s\n", exchange.name().c_str(), "p50 us", "p99 us", "p99.9 us",
                    "requests/s", "CPU us");
    }
    void baseline(const std::string& name, const std::vector<double>& latencies_us) {
        baselines_[name] = percentile(latencies_us, 0.5);
        line(name, latencies_us);
        std::printf("\n");
    }
    /// `against` is the name of a baseline of this exchange.
    void way(const std::string& name, const Measured& measured, const std::string& against) {
        const auto count = static_cast<double>(measured.latencies_us.size());
        const double per_second = count / measured.wall_us * 1e6;
        const double processor = measured.processor_us / count;
        line(name, measured.latencies_us);
        const double p50 = percentile(measured.latencies_us, 0.5);
        std::printf(" %11.1f %10.1f %8.2f x %s\n", per_second, processor, p50 / baselines_[against], against.c_str());
        std::fflush(stdout);
        const std::string prefix = name + ", " + exchange_.name() + ": ";
        records_.push_back({prefix + "p50", p50, "us", against, baselines_[against]});
        for (const auto& [what, of] : {std::pair{"p99", 0.99}, {"p99.9", 0.999}})
            if (const double value = percentile(measured.latencies_us, of); !std::isnan(value))
                records_.push_back({prefix + what, value, "us", "", 0});
        records_.push_back({prefix + "throughput", per_second, "1/s", "", 0});
        records_.push_back({prefix + "processor time of both sides, a request", processor, "us", "", 0});
    }
    /// The same with another size of payload, in turns; `ratio` is the median of the rounds' own.
    void size(const std::string& name, const Measured& large, const Measured& small, double ratio) {
        std::printf("  %-38s %10.1f %10.1f %8.2f x, goal %.2f x\n", name.c_str(), percentile(large.latencies_us, 0.5),
                    percentile(small.latencies_us, 0.5), ratio, size_goal);
        std::fflush(stdout);
        records_.push_back({name + ", 1 GB there against 64 B there, median of rounds", ratio, "x", "goal", size_goal});
    }
    static void left_out(const std::string& name, const std::string& why) {
        std::printf("  %-38s left out: %s\n", name.c_str(), why.c_str());
    }
    [[nodiscard]] const Records& records() const { return records_; }

private:
    static constexpr double size_goal = 1.05;

    static void line(const std::string& name, const std::vector<double>& latencies_us) {
        std::printf("  %-38s", name.c_str());
        for (const double of : {0.5, 0.99, 0.999})
            if (const double value = percentile(latencies_us, of); std::isnan(value))
                std::printf(" %10s", "-");
            else
                std::printf(" %10.1f", value);
    }
    Exchange exchange_{};
    std::map<std::string, double> baselines_;
    Records records_;
};

/// Models of the minimal worker: the plane is measured, and no LibTorch.
std::string fleet() {
    const auto model = [](const std::string& name, const std::string& answer) {
        return test::minimal_model(
            name, {},
            "inputs: {x: {dtype: uint8, shape: [1..1073741824]}}\nwarmup: {x: [64]}\n"
            "outputs: {y: {dtype: uint8, shape: [" +
                answer + "]}}\nchannel: {input: 64KiB, output: 64KiB, max: 3GiB, worker_max: 16GiB, count: 64}\n");
    };
    return test::fleet({model("echo", "1..1073741824"), model("head", "4")});
}

class Contest {
public:
    Contest() {
        options_.programs = test::minimal_programs();
        daemon_.emplace(fleet(), options_);
        for (const char* model : {"echo", "head"}) (void)daemon_->load(model).value();
        const std::vector<pid_t> workers{daemon_->pid("echo"), daemon_->pid("head")};
        const std::string socket = daemon_->socket();
        const auto ours = [socket](std::vector<std::string> program, const std::string& transport) {
            return [=](const Exchange& exchange) {
                std::vector<std::string> argv = program;
                for (const std::string& one :
                     {socket, std::string{exchange.echo ? "echo" : "head"}, std::to_string(exchange.bytes), transport})
                    if (!one.empty()) argv.push_back(one);
                return argv;
            };
        };
        const std::string client = test::program("channel_client");
        const std::string python = BULKHEAD_PYTHON;
        const std::string source = BULKHEAD_SOURCE_DIR;
        ways_.push_back({"C++, rings", ours({client}, "rings"), {}, workers, 2, 1});
        ways_.push_back({"C++, seqpacket", ours({client}, "seqpacket"), {}, workers, 2, 1});
        ways_.push_back({"Python, seqpacket",
                         ours({python, source + "/tests/bench/peers/channel_client.py"}, {}),
                         {"PYTHONPATH=" + source + "/clients/python", "PYTHONDONTWRITEBYTECODE=1"},
                         workers,
                         2,
                         1});
        add_grpc();
        add_triton(source);
    }

    void measure(const Exchange& exchange) {
        const Placement placement{exchange.on};
        if (!placement.possible()) return;
        table_.heading(exchange);
        std::vector<Crowd> crowds;
        for (const Way& way : ways_) {
            if (way.bytes_held(exchange) > static_cast<double>(read_machine_memory().available) / 2) {
                Table::left_out(way.name, "it would need more than half of the memory that is available");
                continue;
            }
            Crowd crowd{way, exchange, placement};
            if (crowd.cannot().empty())
                crowds.push_back(std::move(crowd));
            else
                Table::left_out(way.name, crowd.cannot());
        }
        if (crowds.empty()) return;
        const bool copied = exchange.echo && exchange.bytes >= 1 << 20;
        FutexPingPong futex;
        placement.client(::getpid());
        placement.server(futex.other());
        std::optional<Memcpy> memcpy;
        if (copied) memcpy.emplace(exchange.bytes);
        std::vector<double> futexes;
        std::vector<double> copies;
        for (int i = 0; i < rounds; ++i) {
            for (Crowd& crowd : crowds)
                if (crowd.cannot().empty()) crowd.round();
            const std::vector<double> wakes = futex.round_trips(500);
            futexes.insert(futexes.end(), wakes.begin(), wakes.end());
            if (!memcpy) continue;
            const std::vector<double> some = memcpy->copies(std::max<std::uint64_t>(2, (64 << 20) / exchange.bytes));
            copies.insert(copies.end(), some.begin(), some.end());
        }
        table_.baseline(futex_name, futexes);
        const std::string copy_name = "one memcpy of " + exchange.size();
        if (memcpy) table_.baseline(copy_name, copies);
        for (const Crowd& crowd : crowds)
            if (crowd.cannot().empty())
                table_.way(crowd.way().name, crowd.so_far(), copied ? copy_name : futex_name);
            else
                Table::left_out(crowd.way().name, crowd.cannot());
    }
    /// What its size adds to a request whose payload lies in the slab already: nothing is copied,
    /// so it should be nothing.
    void compare_sizes() {
        const Exchange small{64, false, 1};
        const Exchange large{std::uint64_t{1} << 30, false, 1};
        const Placement placement{On::one_cpu};
        std::printf("\n  %-38s %10s %10s\n", "size alone, 4 B back, 1 client, one CPU", "1 GB us", "64 B us");
        for (const Way& way : ways_) {
            if (!way.name.starts_with("C++") && !way.name.starts_with("Python")) continue;
            if (way.bytes_held(large) > static_cast<double>(read_machine_memory().available) / 2) {
                Table::left_out(way.name, "it would need more than half of the memory that is available");
                continue;
            }
            Crowd with_large{way, large, placement};
            Crowd with_small{way, small, placement};
            const auto both_can = [&] {
                const std::string& why = with_large.cannot().empty() ? with_small.cannot() : with_large.cannot();
                if (!why.empty()) Table::left_out(way.name, why);
                return why.empty();
            };
            if (!both_can()) continue;
            std::vector<double> ratios;
            for (int i = 0; i < size_rounds && with_large.cannot().empty() && with_small.cannot().empty();
                 ++i) {  // each goes first as often as the other
                const bool large_first = i % 2 == 0;
                const double first = (large_first ? with_large : with_small).round();
                const double second = (large_first ? with_small : with_large).round();
                ratios.push_back(large_first ? first / second : second / first);
            }
            if (!both_can()) continue;
            table_.size(way.name, with_large.so_far(), with_small.so_far(), median(ratios));
        }
    }
    [[nodiscard]] const Records& records() const { return table_.records(); }

private:
    static constexpr const char* futex_name = "futex ping-pong, both asleep";

    void add_grpc() {
        const std::string program = test::program("grpc_echo");
        if (::access(program.c_str(), X_OK) != 0)
            return Table::left_out("gRPC", "libgrpc++-dev and protobuf-compiler-grpc were not there at the build");
        const std::string socket = daemon_->folder().path() / "grpc";
        servers_.emplace_back(std::vector<std::string>{program, "server", socket});
        ways_.push_back({"gRPC unary, Unix socket",
                         [=](const Exchange& exchange) {
                             return std::vector<std::string>{program, "client", socket, std::to_string(exchange.bytes),
                                                             std::to_string(exchange.answer_bytes())};
                         },
                         {},
                         {servers_.back().pid()},
                         8,
                         8});
    }

    /// `BULKHEAD_TRITON` is a Python that has nvidia-pytriton: see peers/triton_echo.py.
    void add_triton(const std::string& source) {
        const char* python = std::getenv("BULKHEAD_TRITON");
        if (python == nullptr)
            return Table::left_out("Triton", "BULKHEAD_TRITON names no Python that has nvidia-pytriton");
        const std::string script = source + "/tests/bench/peers/triton_echo.py";
        const std::string folder = daemon_->folder().path();
        Peer server{{python, script, "server", folder}};
        if (const std::string why = server.await_ready(); !why.empty()) return Table::left_out("Triton", why);
        ways_.push_back({"Triton, python backend, shared memory",
                         [=, python = std::string{python}](const Exchange& exchange) {
                             return std::vector<std::string>{python,
                                                             script,
                                                             "client",
                                                             folder,
                                                             std::to_string(exchange.bytes),
                                                             std::to_string(exchange.answer_bytes())};
                         },
                         {},
                         server.family(),
                         6,
                         6});
        servers_.push_back(std::move(server));
    }

    test::SpawnOptions options_;
    std::optional<test::Daemon> daemon_;
    std::vector<Peer> servers_;
    std::vector<Way> ways_;
    Table table_;
};

Records channel() {
    Contest contest;
    for (const On on : {On::one_cpu, On::two_cpus}) contest.measure({64, true, 1, on});
    for (const int clients : {1, 4, 16}) contest.measure({64, true, clients});
    for (const std::uint64_t bytes : {std::uint64_t{1} << 20, std::uint64_t{64} << 20})
        for (const int clients : {1, 4, 16})
            for (const bool echo : {false, true}) contest.measure({bytes, echo, clients});
    for (const int clients : {1, 4, 16})
        for (const bool echo : {false, true}) contest.measure({std::uint64_t{1} << 30, echo, clients});
    contest.compare_sizes();
    return contest.records();
}

const Bench channel_bench{"channel",
                          "C++ and Python clients beside futex, memcpy, gRPC and Triton; echo worker without LibTorch",
                          channel, Bench::Prints::itself};

}  // namespace
}  // namespace bulkhead::bench::channel_bench
