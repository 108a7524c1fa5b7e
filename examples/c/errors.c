/* Bad arguments give an error code and a message, and nothing is written.
 *
 *     cargo build --release -p ironhorse-capi
 *     gcc -I crates/capi/include examples/c/errors.c -L target/release -Wl,-rpath,"$PWD/target/release" -lironhorse -o errors
 *     ./errors
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ironhorse.h"

static int failed = 0;

static void refused(int32_t code, const char *says) {
    printf("%d: %s\n", (int)code, ih_last_error());
    if (code != IH_INVALID_VALUE || strstr(ih_last_error(), says) == NULL) {
        printf("    expected %d and '%s'\n", (int)IH_INVALID_VALUE, says);
        failed = 1;
    }
}

int main(void) {
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8] = {0}, loss = 7.0f;
    int32_t targets[2] = {0, 4};
    if (ih_last_error()[0] != '\0') failed = 1;
    refused(cuda_silu(NULL, y, 8, NULL), "`x` is null");
    refused(cuda_silu(x, y, -1, NULL), "`n` is -1");
    refused(cuda_silu(x, y, INT64_MAX, NULL), "`x`");
    refused(cuda_gemm(x, x, y, INT32_MAX, INT32_MAX, INT32_MAX, 1.0f, 0.0f, NULL), "`c`");
    refused(cuda_gemm(x, y, y, 2, 2, 2, 1.0f, 0.0f, NULL), "overlaps");
    refused(cuda_cross_entropy_forward(x, targets, &loss, y, 2, 4, NULL), "`targets[1]` is 4");
    refused(ih_set_threads(-3), "`threads` is -3");
    if (cuda_silu(NULL, NULL, 0, NULL) != IH_SUCCESS) failed = 1;
    for (int i = 0; i < 8; i++) failed |= y[i] != 0.0f;
    failed |= loss != 7.0f;
    puts(failed ? "failed" : "ok");
    return failed;
}
