// lease_holder SOCKET MODEL [gpu]: clients that are there to be killed. For each byte on stdin it
// forks one, which opens a channel and holds input and output leases with a request in flight, for
// ever; with a third word they lie on GPU 0, and no request is in flight: a worker may have to end
// for the death of a client that the GPU waits for. On stdout come records: 'b' and the client's
// pid, 'h' once it holds leases, 'x' and a text's size and the text where something was wrong, 'e'
// when it has ended.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "bulkhead/channel.h"
#include "ipc/cuda/gpu.h"

using namespace bulkhead;

namespace {

void tell(char what, std::int32_t number = 0, const std::string& text = {}) {
    std::string record(1, what);
    record.append(reinterpret_cast<const char*>(&number), sizeof number);
    record += text;
    // Up to PIPE_BUF at once, or not at all.
    if (::write(1, record.data(), record.size()) < 0) ::_exit(1);
}

[[noreturn]] void wrong(const std::string& what) {
    tell('x', static_cast<std::int32_t>(std::min<std::size_t>(what.size(), 1024)), what.substr(0, 1024));
    ::_exit(1);
}

template <typename T>
T must(Result<T> result) {
    if (!result) wrong(result.error().text());
    return std::move(*result);
}

void must(const Result<>& result) {
    if (!result) wrong(result.error().text());
}

using Values = std::array<float, 512>;

/// Where the tensors lie, and how values come there and back.
class Place {
public:
    virtual ~Place() = default;
    virtual void prepare(ChannelOptions&) {}
    virtual void settle_in(Channel&) {}  ///< before anything is allocated
    virtual Input allocate(Channel& channel) { return must(channel.allocate(wire::DType::float32, dims)); }
    virtual void write(Input& input, const Values& values) { std::ranges::copy(values, input.as<float>().begin()); }
    virtual void read(Output& output, Values& values) { std::ranges::copy(output.as<float>(), values.begin()); }
    [[nodiscard]] virtual void* stream() const { return nullptr; }
    [[nodiscard]] virtual bool is_killed_at_work() const { return true; }

protected:
    static constexpr std::array<std::int64_t, 1> dims{std::tuple_size_v<Values>};
};

class OnGpu final : public Place {
public:
    void prepare(ChannelOptions& options) override { options.gpu = gpu_ = must(cuda::Gpu::open(0)); }
    void settle_in(Channel& channel) override {
        const cuda::Gpu::Current current{*gpu_};
        must(gpu_->driver().check("cuStreamCreate",
                                  gpu_->driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING)));
        must(channel.keep_outputs_on_gpu(sizeof(Values)));
    }
    Input allocate(Channel& channel) override {
        Input input = must(channel.allocate_on_gpu(wire::DType::float32, dims));
        if (!input.gpu()) wrong(channel.why_no_gpu()->text());
        return input;
    }
    void write(Input& input, const Values& values) override { copy(input.bytes().data(), values.data()); }
    void read(Output& output, Values& values) override {
        if (!output.gpu()) wrong("an output that is not on the GPU");
        must(output.read_on(stream_));
        copy(values.data(), output.bytes().data());
        const cuda::Gpu::Current current{*gpu_};
        must(gpu_->driver().check("cuStreamSynchronize", gpu_->driver().cuStreamSynchronize(stream_)));
    }
    [[nodiscard]] void* stream() const override { return stream_; }
    [[nodiscard]] bool is_killed_at_work() const override { return false; }

private:
    void copy(void* to, const void* from) {
        const cuda::Gpu::Current current{*gpu_};
        must(gpu_->driver().check("cuMemcpyAsync",
                                  gpu_->driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(to),
                                                               reinterpret_cast<cuda::CUdeviceptr>(from),
                                                               sizeof(Values), stream_)));
    }
    std::shared_ptr<const cuda::Gpu> gpu_;
    cuda::CUstream stream_ = nullptr;
};

/// Never returns: it is killed.
[[noreturn]] void hold_leases(const char* socket, const char* model, Place& place) {
    ControlClient control = must(ControlClient::connect(socket));
    ChannelOptions options;
    options.client = "lease_holder";
    place.prepare(options);
    Channel channel = must(Channel::open(control, model, options));
    place.settle_in(channel);
    Input held = place.allocate(channel);
    Input input = place.allocate(channel);
    const NamedInput named{"x", &input};
    Request request;
    request.inputs = {&named, 1};
    request.stream = place.stream();
    std::deque<Output> outputs;
    Values values{};
    for (std::int64_t round = 0;; ++round) {
        const auto mark = static_cast<float>(round % 4096);
        values.fill(mark);
        place.write(input, values);
        const std::uint64_t sent = must(channel.submit(request));
        if (round == 2 && place.is_killed_at_work()) tell('h');
        Reply reply = must(channel.wait(sent));
        for (Output& output : reply.outputs) {
            place.read(output, values);
            if (values.back() != mark) wrong("a wrong answer");
            outputs.push_back(std::move(output));
        }
        if (outputs.size() > 8) outputs.pop_front();
        if (round < 2 || place.is_killed_at_work()) continue;
        tell('h');
        for (;;) ::pause();
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) return 2;
    Place on_host;
    OnGpu on_gpu;  // opened by each client: CUDA bears no fork
    Place& place = argc == 4 ? on_gpu : on_host;
    for (char next = 0; ::read(0, &next, 1) == 1;) {
        const pid_t client = ::fork();
        if (client == 0) hold_leases(argv[1], argv[2], place);
        tell('b', client);
        ::waitpid(client, nullptr, 0);
        tell('e');
    }
}
