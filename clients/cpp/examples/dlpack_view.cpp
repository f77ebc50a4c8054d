// Uses another library's tensor as input, and shows a result as that library sees it.
//   dlpack_view MODEL INPUT

#include <array>
#include <cstdio>

#include <bulkhead/dlpack.h>

namespace {

/// What a library exports: six floats, 2 × 3, in column order.
std::array<float, 6> values{0, 3, 1, 4, 2, 5};
std::array<std::int64_t, 2> shape{2, 3}, strides{1, 2};

bulkhead::DLPackTensor exported() {
    auto* tensor = new DLManagedTensorVersioned{};
    tensor->version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    tensor->deleter = [](DLManagedTensorVersioned* self) { delete self; };
    tensor->dl_tensor = {values.data(), {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape.data(), strides.data(), 0};
    return bulkhead::DLPackTensor{tensor};
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return std::fputs("usage: dlpack_view MODEL INPUT\n", stderr), 2;
    try {
        auto control = bulkhead::ControlClient::connect(bulkhead::find_socket()).value();
        auto channel = bulkhead::Channel::open(control, argv[1]).value();
        bulkhead::ImportedInput x = bulkhead::from_dlpack(channel, exported()).value();
        std::printf("the input was %s\n", x.copied ? "copied, once" : "there already");

        const std::array<bulkhead::NamedInput, 1> inputs{{{argv[2], &x.input}}};
        bulkhead::Reply reply = channel.infer({.inputs = inputs}).value();
        // The worker's memory, read-only; its lease ends with the tensor.
        const bulkhead::DLPackTensor result = bulkhead::to_dlpack(std::move(reply.outputs.front()));
        const auto* numbers = static_cast<const float*>(result->dl_tensor.data);
        std::printf("the result has %d dimensions, its second value is %g\n", result->dl_tensor.ndim,
                    static_cast<double>(numbers[1]));
    } catch (const bulkhead::ErrorException& failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        return 1;
    }
}
