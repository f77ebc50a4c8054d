// Sends one request: a model's first tensor filled with ones.
//   infer MODEL INPUT DIM…

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include <bulkhead/channel.h>

int main(int argc, char** argv) {
    if (argc < 4) return std::fputs("usage: infer MODEL INPUT DIM...\n", stderr), 2;
    std::vector<std::int64_t> dims;
    for (int i = 3; i < argc; ++i) dims.push_back(std::atoll(argv[i]));

    try {  // `value()` throws the Result's error
        auto control = bulkhead::ControlClient::connect(bulkhead::find_socket()).value();
        auto channel = bulkhead::Channel::open(control, argv[1]).value();
        bulkhead::Input x = channel.allocate(bulkhead::wire::DType::float32, dims).value();
        std::ranges::fill(x.as<float>(), 1.0f);  // in memory shared with the worker:
                                                 // nothing is copied

        const std::array<bulkhead::NamedInput, 1> inputs{{{argv[2], &x}}};
        const bulkhead::Reply reply = channel.infer({.inputs = inputs, .retry_safe = true}).value();
        for (const bulkhead::Output& output : reply.outputs)
            std::printf("%s: %zu bytes, the first value %g\n", std::string{output.name()}.c_str(),
                        output.bytes().size(), static_cast<double>(output.as<float>()[0]));
    } catch (const bulkhead::ErrorException& failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
}
