// What LibTorch allocates for one request serves the next one, and goes back when none comes.

#include <gtest/gtest.h>

#include <unistd.h>

#include <chrono>
#include <sstream>

#include "tests/support/cpus.h"
#include "tests/support/daemon/daemon.h"
#include "tests/support/daemon/fleets.h"
#include "tests/support/file_text.h"

namespace bulkhead::test {
namespace {

constexpr std::int64_t elements = 16 << 20;
constexpr std::int64_t tensor_bytes = elements * 4;
constexpr std::int64_t page_bytes = 4096;

/// Of a process since it began: pages that the kernel had to make for it.
std::int64_t page_faults(pid_t pid) {
    const std::string stat = file_text("/proc/" + std::to_string(pid) + "/stat");
    // From the third field on; the tenth is minflt.
    std::istringstream fields{stat.substr(stat.rfind(')') + 2)};
    std::string skipped;
    for (int i = 3; i < 10; ++i) fields >> skipped;
    std::int64_t faults = -1;
    fields >> faults;
    return faults;
}

std::int64_t anonymous_bytes(pid_t pid) {
    std::istringstream status{file_text("/proc/" + std::to_string(pid) + "/status")};
    for (std::string line; std::getline(status, line);)
        if (line.starts_with("RssAnon:")) return std::stoll(line.substr(8)) * 1024;
    return -1;
}

/// A model whose result is allocated by LibTorch, and a client that sends the same tensor
/// again and again.
class Cloning {
public:
    explicit Cloning(const std::string& environment = {})
        : daemon_{fleet({test_model("clone", "clone.pt", "channel: {input: 64MiB, output: 64MiB}\n" + environment)})},
          channel_{daemon_.open("clone").value()},
          input_{channel_.allocate(wire::DType::float32, std::array{elements}).value()},
          worker_{daemon_.pid("clone")} {}

    [[nodiscard]] pid_t worker() const noexcept { return worker_; }
    void infer() {
        const std::array<NamedInput, 1> inputs{{{"x", &input_}}};
        Request request;
        request.inputs = inputs;
        const auto reply = channel_.infer(request);
        ASSERT_TRUE(reply) << reply.error().text();
    }

private:
    Daemon daemon_;
    Channel channel_;
    Input input_;
    pid_t worker_;
};

/// While one lives, this process and those that it starts have one CPU.
class OneCpu {
public:
    OneCpu() { EXPECT_TRUE(keep_on({all_.front()}, ::getpid())); }
    ~OneCpu() { keep_on(all_, ::getpid()); }

private:
    const std::vector<int> all_ = allowed_cpus();
};

std::int64_t faults_of_the_fourth_request() {
    Cloning client;
    for (int i = 0; i < 3; ++i) client.infer();
    const std::int64_t before = page_faults(client.worker());
    client.infer();
    return page_faults(client.worker()) - before;
}

TEST(ActivationMemory, OfOneRequestServesTheNext) {
    EXPECT_LT(faults_of_the_fourth_request(), tensor_bytes / page_bytes / 8);
}

TEST(ActivationMemory, OfOneRequestServesTheNextOnOneCpu) {
    const OneCpu pinned;
    EXPECT_LT(faults_of_the_fourth_request(), tensor_bytes / page_bytes / 8);
}

TEST(ActivationMemory, GoesBackWhileTheWorkerIdles) {
    Cloning client{"environment: {MALLOC_CONF: 'dirty_decay_ms:100'}"};
    const std::int64_t idle = anonymous_bytes(client.worker());

    client.infer();

    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{20};
    std::int64_t resident = anonymous_bytes(client.worker());
    while (resident > idle + tensor_bytes / 8 && std::chrono::steady_clock::now() < until)
        resident = anonymous_bytes(client.worker());
    EXPECT_LE(resident, idle + tensor_bytes / 8);
}

}  // namespace
}  // namespace bulkhead::test
