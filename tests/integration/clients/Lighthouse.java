// The HTTP client that Java has, as Spring AI and LangChain4j use it: with its first request it offers to go on in HTTP/2 (h2c).
//
//     java Lighthouse.java URL MODEL PROMPT MAX_TOKENS

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

public class Lighthouse {
    static final Pattern CONTENT = Pattern.compile("\"content\": ?\"((?:[^\"\\\\]|\\\\.)*)\"");

    /** What stands in the quotes, as it stands there. */
    static String contents(String json) {
        StringBuilder found = new StringBuilder();
        for (Matcher matcher = CONTENT.matcher(json); matcher.find(); ) found.append(matcher.group(1));
        return found.toString();
    }

    static void tell(String how, String escaped) {
        System.out.println("{\"how\": \"" + how + "\", \"text\": \"" + escaped + "\"}");
    }

    static HttpRequest asking(String[] words, String more) {
        String message = "{\"role\": \"user\", \"content\": \"" + words[2] + "\"}";
        String body = "{\"model\": \"" + words[1] + "\", \"messages\": [" + message + "], \"max_tokens\": " + words[3] + ", \"temperature\": 0" + more + "}";
        return HttpRequest.newBuilder(URI.create(words[0] + "/v1/chat/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    public static void main(String[] words) throws Exception {
        for (int turn = 0; turn < 2; turn++) {
            HttpClient client = HttpClient.newHttpClient();
            var whole = client.send(asking(words, ""), BodyHandlers.ofString());
            if (whole.statusCode() != 200) throw new IllegalStateException(whole.statusCode() + ": " + whole.body());
            tell("whole, turn " + turn, contents(whole.body()));
            var lines = client.send(asking(words, ", \"stream\": true"), BodyHandlers.ofLines()).body().filter(line -> line.startsWith("data: ")).toList();
            if (!lines.get(lines.size() - 1).equals("data: [DONE]")) throw new IllegalStateException(String.join("\n", lines));
            tell("stream, turn " + turn, contents(String.join("\n", lines)));
        }
    }
}
